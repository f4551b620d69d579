"""What is in ``/dev/shm``, where tests that run at the same time leave things on purpose."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from string import ascii_lowercase

FOLDER = Path("/dev/shm")
# No two runs share these: each has a folder for temporary files, which its processes know.
_RUN = Path(tempfile.gettempdir()).name
FORGOTTEN = FOLDER / f"forgotten-by-a-worker-{_RUN}"
WRITTEN = FOLDER / f"written-and-closed-{_RUN}"
_OTHER = "somebody-elses-"
FOREIGN = FOLDER / (_OTHER + "".join(random.choices(ascii_lowercase, k=12)))


def names() -> set[str]:
    """The names there, but for those that are left on purpose.

    And but for the semaphores of `multiprocessing`: other programs of the machine keep some while
    they run, and those whose traces are looked for use none.
    """
    strange = ("sem.mp-", _OTHER, "forgotten-by-a-worker-", "written-and-closed-")
    return {path.name for path in FOLDER.iterdir() if not path.name.startswith(strange)}
