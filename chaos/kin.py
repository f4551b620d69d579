"""What the workers of a run have started, known again when it hides.

Guarantees: who was seen below a worker is known to be the run's from then on, also with another
session, no environment and no parent, and whoever of the run saw it: each writes down what it sees.

Left to others: when to look (a few times a second, and before each fault: what a worker starts and
loses between two looks is found by its mark alone); whether it is there at the end (`footprint`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from phalanx.runtime import read_tasks

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = ".pids"
"""Files with a line for each process of a rank: its pid, and when it was started, in ticks."""
_SUFFIX = ".kin"


class Kin:
    """The processes below the workers of one run, as far as one process has seen them.

    Args:
        folder: That of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._seen: set[tuple[int, int]] = set()

    def look(self) -> None:
        """See who is below a worker now."""
        with self._lock:
            known = keys_in(self._folder, WORKERS) | self._seen
            if not known:
                return
            tasks = read_tasks()
            children: dict[int, list[tuple[int, int]]] = {}
            for task in tasks.values():
                children.setdefault(task.parent, []).append(task.key)
            queue = [key for key in known if key[0] in tasks and tasks[key[0]].key == key]
            new: list[tuple[int, int]] = []
            while queue:
                fresh = [key for key in children.get(queue.pop()[0], ()) if key not in known]
                known.update(fresh)
                queue += fresh
                new += fresh
            if new:
                self._seen.update(new)
                path = self._folder / f"{os.getpid()}{_SUFFIX}"
                # On a full disk it is not known, and what is being watched goes on.
                with contextlib.suppress(OSError), path.open("a") as file:
                    file.writelines(f"{pid} {ticks}\n" for pid, ticks in new)


def read_kin(folder: Path) -> set[tuple[int, int]]:
    """Return who was seen below the workers of the run in *folder*: (pid, ticks)."""
    return keys_in(folder, _SUFFIX)


def keys_in(folder: Path, suffix: str) -> set[tuple[int, int]]:
    """Return what stands in those files of *folder*: (pid, ticks)."""
    found: set[tuple[int, int]] = set()
    for path in folder.glob(f"*{suffix}"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 2:  # the death of its writer may have cut it short
                found.add((int(words[0]), int(words[1])))
    return found
