"""What is in ``/dev/shm``, where tests that run at the same time leave things on purpose."""

from __future__ import annotations

import random
from pathlib import Path
from string import ascii_lowercase

FOLDER = Path("/dev/shm")
FORGOTTEN = FOLDER / "forgotten-by-a-worker"
WRITTEN = FOLDER / "written-and-closed"
_OTHER = "somebody-elses-"
FOREIGN = FOLDER / (_OTHER + "".join(random.choices(ascii_lowercase, k=12)))  # no two runs share it


def names() -> set[str]:
    """The names there, but for those that are left on purpose.

    And but for the semaphores of `multiprocessing`: other programs of the machine keep some while
    they run, and those whose traces are looked for use none.
    """
    strange = ("sem.mp-", _OTHER)
    there = {path.name for path in FOLDER.iterdir() if not path.name.startswith(strange)}
    return there - {FORGOTTEN.name, WRITTEN.name}
