"""A run in a folder, for tests to kill; prints its steps.

Usage: training_driver.py FOLDER STEPS TRAINER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support import training_workers

from phalanx.integrations.torch import Training


def main(folder: str, steps: int, trainer: str) -> None:
    sharded = trainer == "Sharded"
    rank: Any = getattr(training_workers, trainer)
    with Training(rank, 2, folder=folder, threads=1, sharded=sharded, every=1) as run:
        print("from", run.step, flush=True)
        for step in run.steps(steps):
            print("step", step.number, flush=True)
        print("digest", run.digest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
