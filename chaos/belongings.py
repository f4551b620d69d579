"""Files that a run has made in folders that outlive it, whatever they are called.

Guarantees: a file counts only if it is seen to be the run's: a process of it had it open or mapped,
or the driver asked for it as a temporary one. What other programs make meanwhile is never counted.

Left to others: whether it is still there at the end (`footprint`). What a process makes and loses
between two looks is not seen, nor are temporary files of workers: libraries make some when they are
imported, and remove them at the exit that a SIGKILL does not leave time for.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime import MARK, read_tasks

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

SHM = Path("/dev/shm")  # noqa: S108  # looked at, not written to
_LOOKS = 40  # for the owner of a name; then it is somebody else's
_TEMPORARY = ("tempfile.mkdtemp", "tempfile.mkstemp")


class Belongings:
    """What is known of one run's files.

    Args:
        before: What was in shared memory before it.

    Attributes:
        paths: The run's, there or gone.
    """

    def __init__(self, before: frozenset[Path]) -> None:
        self.paths: set[Path] = set()
        self._before = before
        self._looks: dict[Path, int] = {}

    def look(self, trees: set[str]) -> None:
        """See which new files of shared memory this process has, or one of *trees*."""
        new = {path for path in _names(SHM) if path not in self._before | self.paths}
        new = {path for path in new if self._looks.get(path, 0) < _LOOKS}
        if not new:
            return  # as nearly always: nobody is asked anything
        for path in new:
            self._looks[path] = self._looks.get(path, 0) + 1
        held = set(_held_by(os.getpid()))
        for pid in _members(trees):
            held.update(_held_by(pid))
        self.paths |= new & held

    @contextlib.contextmanager
    def noted(self) -> Generator[None, None, None]:
        """Note the temporary files and folders that this process makes while the block runs."""
        if not _watching:
            sys.addaudithook(_on_audit)  # for good: there is no way to take one out
        _watching.append(self)
        try:
            yield
        finally:
            _watching[_watching.index(self)] = None


_watching: list[Belongings | None] = []
_lock = threading.Lock()


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _TEMPORARY:
        return
    made = args[0] if args else None
    if not isinstance(made, str) or _is_importing():
        return
    with _lock:
        for each in _watching:
            if each is not None:
                each.paths.add(Path(made))


def _is_importing() -> bool:
    """Whether a module is being imported: what that makes, it keeps until the process exits."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def _names(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from folder.iterdir()


def _members(trees: set[str]) -> Iterator[int]:
    """Yield the living processes of *trees*."""
    marks = [f"{MARK}=".encode(), *(f"{tree}/".encode() for tree in trees)]
    for task in read_tasks().values():
        if task.is_kernel_thread or task.state in ("Z", "X"):
            continue
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{task.pid}/environ").read_bytes()
            if marks[0] in environ and any(mark in environ for mark in marks[1:]):
                yield task.pid


def _held_by(pid: int) -> Iterator[Path]:
    """Yield the files of shared memory that process *pid* has open or mapped."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = fd.readlink()
                if target.parent == SHM:
                    yield target
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            _, _, name = line.partition(f" {SHM}/")
            if name:
                yield SHM / name
