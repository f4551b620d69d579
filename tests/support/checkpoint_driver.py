"""A program whose workers' states outlive it. Run by the tests, which kill it.

Usage: checkpoint_driver.py FOLDER CALLS; prints the count after each call.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.checkpoint_workers import Counter
from tests.support.transport import TRANSPORT

from phalanx import CheckpointPolicy, Executor, Launch


def main(folder: str, calls: int) -> None:
    policy = CheckpointPolicy(every_calls=1, where=folder, resume=True)
    with Executor(
        Counter, 2, launch=Launch(preload=(), transport=TRANSPORT), checkpoint=policy
    ) as ex:
        print(*ex.collective_rpc("get"), flush=True)
        for _ in range(calls):
            print(*ex.collective_rpc("add"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
