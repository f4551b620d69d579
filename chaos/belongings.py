"""Files that a run has made in folders that outlive it, whatever they are called.

Guarantees: a file counts only if it is seen to be the run's: a process of it had it open or mapped
in shared memory; or Python code of the driver or of a worker made it there, or asked for it as a
temporary one. What other programs make meanwhile is never counted.

Left to others: whether it is still there at the end (`footprint`). What native code, or a program
that a worker has started, makes and closes between two looks is not seen. Nor is what is made by
the import of a module, which removes it at the exit that a SIGKILL does not leave time for.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime import MARK, read_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

SHM = Path("/dev/shm")  # noqa: S108  # looked at, not written to
_LOOKS = 40  # for the owner of a name; then it is somebody else's
_MADE = ".made"  # of files with a line for each file that a worker was seen to make
_TEMPORARY = ("tempfile.mkdtemp", "tempfile.mkstemp")
_NAMING = {"open": 0, "os.mkdir": 0, "os.rename": 1}  # where these say what there is from now on


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
        place = _watch(self.paths.add)
        try:
            yield
        finally:
            _watching[place] = None


def note_made(folder: Path) -> None:
    """Have what this process, a worker of the run in *folder*, makes from now on written down."""
    known: set[Path] = set()
    file = folder / f"{os.getpid()}{_MADE}"

    def note(path: Path) -> None:
        # Elsewhere what is torn by a kill lies beside what is kept, for its owner to see.
        is_lost = path.is_relative_to(SHM) or path.is_relative_to(tempfile.gettempdir())
        if is_lost and path not in known:
            known.add(path)
            with file.open("a") as lines:
                lines.write(f"{os.fsencode(path).hex()}\n")

    _watch(note)


def read_made(folder: Path) -> set[Path]:
    """Return what the workers of the run in *folder* were seen to make."""
    found: set[Path] = set()
    for path in folder.glob(f"*{_MADE}"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a full disk has cut it short
                found.add(Path(os.fsdecode(bytes.fromhex(line))))
    return found


_watching: list[Callable[[Path], object] | None] = []
_busy = threading.local()


def _watch(told: Callable[[Path], object]) -> int:
    if not _watching:
        sys.addaudithook(_on_audit)  # for good: there is no way to take one out
    _watching.append(told)
    return len(_watching) - 1


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _TEMPORARY and event not in _NAMING and event != "mmap.__new__":
        return
    if getattr(_busy, "now", False) or not any(_watching):
        return  # the files in which it is written down
    _busy.now = True
    try:
        # What is raised here is raised in what is looked at, a folder that is gone included.
        with contextlib.suppress(Exception):
            made = _made_by(event, args)
            if made is not None and not _is_importing():
                for told in _watching:
                    if told is not None:
                        told(made)
    finally:
        _busy.now = False


def _made_by(event: str, args: tuple[Any, ...]) -> Path | None:
    """Return what there is by this event that may outlive the run, if there is."""
    if event == "mmap.__new__":  # as of shared memory, of whose opening Python tells nothing
        name: Any = None
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{args[0]}")  # noqa: PTH115  # no use for a Path
    elif event == "open" and not (isinstance(args[2], int) and args[2] & os.O_CREAT):
        return None
    else:
        name = args[_NAMING.get(event, 0)]
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    if not isinstance(name, str | Path):
        return None  # a descriptor
    path = Path(name)
    if event in _TEMPORARY:
        return path.absolute()
    # Of a folder that was there before, what is put into it may be meant to stay.
    return SHM / path.parts[len(SHM.parts)] if SHM in path.parents else None


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
