"""What is in ``/dev/shm``, where tests that run at the same time leave things on purpose."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path("/dev/shm")
FORGOTTEN = FOLDER / "forgotten-by-a-worker"
WRITTEN = FOLDER / "written-and-closed"
FOREIGN = FOLDER / "somebody-elses"


def names() -> set[str]:
    """The names there, but for those that are left on purpose.

    And but for the semaphores of `multiprocessing`: other programs of the machine keep some while
    they run, and those whose traces are looked for use none.
    """
    there = {path.name for path in FOLDER.iterdir() if not path.name.startswith("sem.mp-")}
    return there - {path.name for path in (FORGOTTEN, WRITTEN, FOREIGN)}
