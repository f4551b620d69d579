"""Leaks of a run: `phalanx.testing.LeakDetector`, and the files that Python code creates.

An audit hook notes files in shared memory and temporary files as the driver and its workers create
them. What the import of a module creates is ignored, since modules remove such files at an exit
that SIGKILL prevents.
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

from phalanx.chaos.history.events import LeakFound
from phalanx.chaos.history.journal import now
from phalanx.chaos.nemesis.processes import trees_of
from phalanx.testing import LeakDetector

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

WORKERS = ".pids"
"""Files with a line for each process of a rank: its pid and start time, in ticks."""

_SHM = Path("/dev/shm")  # noqa: S108  # looked at, not written to
_CREATED = ".created"  # files with a line for each file that a worker created
_PATIENCE = 10.0  # seconds for what is about to disappear
_EVENTS = ("open", "os.mkdir", "mmap.__new__", "tempfile.mkdtemp", "tempfile.mkstemp")


class RunLeaks:
    """What the run in *folder* leaves behind; *own*: whether this process is its driver."""

    def __init__(self, folder: Path, *, own: bool = True) -> None:
        self._folder = folder
        self._detector = LeakDetector(
            patience=_PATIENCE,
            own=own,
            children=False,
            devices=own and Path("/dev/nvidiactl").exists(),
        )
        self._detector.pids = {os.getpid()}

    def look(self, driver: int) -> None:
        """Note the processes and the shared memory of the run with this *driver*."""
        assert self._detector.pids is not None
        self._detector.pids.add(driver)
        self._detector.marks |= trees_of(driver)
        self._detector.look()

    @contextlib.contextmanager
    def tracking(self) -> Generator[None]:
        """Note the files that Python code of this process creates in the block."""
        place = _watch(self._detector.files.add)
        try:
            yield
        finally:
            _watchers[place] = None

    def left(self) -> list[LeakFound]:
        """Return what is left behind; wait some seconds for what is about to disappear."""
        assert self._detector.pids is not None
        self._detector.pids |= {pid for pid, _ in keys_in(self._folder, WORKERS)}
        for path in self._folder.glob(f"*{_CREATED}"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # cut short by a full disk
                    self._detector.files.add(Path(os.fsdecode(bytes.fromhex(line))))
        leaks = self._detector.wait_gone()
        return [LeakFound(at=now(), what=leak.what, name=leak.name) for leak in leaks]


def keys_in(folder: Path, suffix: str) -> set[tuple[int, int]]:
    """Return the (pid, ticks) in the files of *folder* that end with *suffix*."""
    lines = [line.split() for p in folder.glob(f"*{suffix}") for line in p.read_text().splitlines()]
    # The death of its writer may have cut a line short.
    return {(int(words[0]), int(words[1])) for words in lines if len(words) == 2}


def track_files(folder: Path) -> None:
    """Write down the files that this process, a worker of the run in *folder*, creates."""
    known: set[Path] = set()
    file = folder / f"{os.getpid()}{_CREATED}"

    def note(path: Path) -> None:
        # Elsewhere, what a kill leaves unfinished lies beside what is kept, for its owner to see.
        temporary = path.is_relative_to(_SHM) or path.is_relative_to(tempfile.gettempdir())
        if temporary and path not in known:
            known.add(path)
            with file.open("a") as lines:
                lines.write(f"{os.fsencode(path).hex()}\n")

    _watch(note)


# --- the audit hook -----------------------------------------------------------------------

_watchers: list[Callable[[Path], object] | None] = []
_busy = threading.local()


def _watch(watcher: Callable[[Path], object]) -> int:
    if not _watchers:
        sys.addaudithook(_on_audit)  # an audit hook cannot be removed
    _watchers.append(watcher)
    return len(_watchers) - 1


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS or getattr(_busy, "now", False) or not any(_watchers):
        return  # *now*: a file of this module
    _busy.now = True
    try:
        # An exception here would be raised in the audited code.
        with contextlib.suppress(Exception):
            created = _created_by(event, args)
            if created is not None and not _is_importing():
                for watcher in filter(None, _watchers):
                    watcher(created)
    finally:
        _busy.now = False


def _created_by(event: str, args: tuple[Any, ...]) -> Path | None:
    """Return what *event* creates, if that may outlive the run."""
    if event == "open" and not (isinstance(args[2], int) and args[2] & os.O_CREAT):
        return None
    name: object = args[0]
    if event == "mmap.__new__":  # as of shared memory, whose opening has no audit event
        name = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115  # no use for a Path
    if not isinstance(name, str | bytes | Path):
        return None  # a descriptor
    path = Path(os.fsdecode(name))
    if event.startswith("tempfile."):
        return path.absolute()
    # A file in a folder that existed before may be meant to stay; in shared memory none is.
    return _SHM / path.parts[len(_SHM.parts)] if _SHM in path.parents else None


def _is_importing() -> bool:
    """Whether a module is being imported."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_find_and_load":
        frame = frame.f_back
    return frame is not None
