"""A run in a folder; tests kill it. Usage: training_driver.py FOLDER STEPS; prints each step."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.training_workers import Replicated

from phalanx.integrations.torch import Training


def main(folder: str, steps: int) -> None:
    with Training(Replicated, 2, folder=folder, threads=1) as run:
        print("from", run.step, flush=True)
        for step in run.steps(steps):
            print("step", step.number, flush=True)
        print("digest", run.digest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
