"""Leak detector: processes, threads, descriptors, files and device memory that outlive a run.

- Only what is new since the detector was made is a leak; `wait_gone` waits for what is ending.
- A process is one if it carries a mark of the detector's trees, descends from one that does, now or
  when `look` was called, or is a child of this process: also a stray of a killed driver.
- A file is one if it is new in a folder of the detector's own, is named for a process of the trees,
  or a process of the trees had it open or mapped when `look` was called.
"""

from __future__ import annotations

import gc
import os
import re
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import find_gpus, process_tree, procfs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_SHM = Path("/dev/shm")  # noqa: S108  # looked at, not written to
# Folders that pytest prunes, and semaphores of multiprocessing: these count if a tree holds them.
_FOREIGN = ("pytest-", "sem.mp-")
_KILL = 5.0
_PAUSE = 0.03  # seconds between two looks at what is on its way out
_LOOKS = 40  # for the owner of a name; then it is another program's
_DEVICE_SLACK_BYTES = 64 << 20
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HELPER = re.compile(rb"([0-9a-f]{32})/\d+\.(?:zygote|collector);")


@dataclass(frozen=True, slots=True)
class LeakScope:
    """The places that `phalanx_leak_check` searches, and its time limit.

    Attributes:
        folders: In these every new entry is a leak, whatever made it: name those that only these
            tests use. Elsewhere only what phalanx has made is one.
        patience: Seconds for what is on its way out already.
    """

    folders: tuple[Path, ...] = ()
    patience: float = 15.0


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing that was left behind.

    Attributes:
        what: ``process``, ``thread``, ``descriptor``, ``file``, ``shared memory`` or
            ``device memory``.
        name: Which one.
    """

    what: str
    name: str

    def __str__(self) -> str:
        return f"{self.what}: {self.name}"


class LeakDetector:
    """Compares what is here with what was here when the detector was made.

    Args:
        marks: Names of trees: a process belongs to one if its environment holds the name and "/".
        folders: See `LeakScope`, as for *patience*, the seconds that `wait_gone` waits.
        own: Whether threads, descriptors and zombies of this process count.
        children: Whether living children of this process count that carry no mark.
        devices: Whether memory of GPUs counts, by NVML.

    Attributes:
        marks: More may be added.
        pids: The pids of all processes of the trees; None: they are not known, and a file of
            phalanx is theirs if it is named for this process or one that no longer exists.
    """

    def __init__(
        self,
        *marks: str,
        folders: tuple[Path, ...] = (),
        patience: float = 15.0,
        own: bool = True,
        children: bool = True,
        devices: bool = False,
    ) -> None:
        self.marks = set(marks)
        self._processes: set[tuple[int, int]] = set()  # that are known to be of the trees
        self._files: set[Path] = set()  # that are known to be made by them
        self.pids: set[int] | None = None
        self._folders = folders
        self._patience = patience
        self._own = own
        self._children = own and children
        self._looks: Counter[Path] = Counter()
        if own:
            gc.collect()
        tasks = procfs.read_all().values()
        self._there = frozenset(task.key for task in tasks)
        # The helpers of a tree that is here already may be started again.
        self._trees = {_helper_of(t.pid) for t in tasks if t.parent == os.getpid()} - {b""}
        self._threads = frozenset(thread.native_id for thread in threading.enumerate())
        self._paths = frozenset(self._entries())
        self._descriptors = Counter(_links(os.getpid()))
        self._device_bytes = _device_bytes() if devices else {}

    def look(self) -> None:
        """Record the processes of the trees, and the new names in /dev/shm that they hold.

        Call it now and then during a run: what a process starts or makes, and no longer has at
        the end, is otherwise found by its mark or its name alone.
        """
        members = self._members()
        self._processes.update(task.key for task in members)
        new = set(_listed(_SHM)) - self._paths - self._files
        new = {path for path in new if self._looks[path] < _LOOKS}
        if new:
            self._looks.update(new)
            for pid in (os.getpid(), *(task.pid for task in members)):
                self._files |= new & set(_held_by(pid))

    def leaks(self) -> list[Leak]:
        """Return what is left now, including what is about to end."""
        found = [
            Leak("process", f"{task.pid} ({task.state}) {procfs.command(task.pid)}".rstrip())
            for task in self._left()
        ]
        there = {*self._entries(), *(path for path in self._files if path.exists())}
        found += [
            Leak("shared memory" if path.parent == _SHM else "file", str(path))
            for path in filter(self._is_left, sorted(there - self._paths))
        ]
        if self._own:
            threads = [t for t in threading.enumerate() if t.native_id not in self._threads]
            found += [Leak("thread", thread.name) for thread in threads]
            new = Counter(_links(os.getpid())) - self._descriptors
            found += [Leak("descriptor", f"{name} ({count})") for name, count in new.items()]
        for uuid, used in (_device_bytes() if self._device_bytes else {}).items():
            more = used - self._device_bytes.get(uuid, used)
            if more > _DEVICE_SLACK_BYTES:
                found.append(Leak("device memory", f"{uuid}: {more} bytes"))
        return found

    def wait_gone(self) -> list[Leak]:
        """Return what is left once everything has ended, or *patience* is over."""
        deadline = time.monotonic() + self._patience
        while True:
            if self._own:
                gc.collect()  # what was still held a moment ago
            found = self.leaks()
            if not found or time.monotonic() >= deadline:
                return found
            time.sleep(_PAUSE)

    def kill(self) -> None:
        """End the processes that are left."""
        roots = {task.key for task in self._left()}
        spare = [pid for pid, _ in self._there]
        for mark in self.marks if roots else ():
            quarry = process_tree.TreeTarget(f"{mark}/".encode(), roots=roots, spare=spare)
            process_tree.kill(quarry, time.monotonic() + _KILL)

    def _members(self) -> list[procfs.Task]:
        """The living processes of the trees, and those that descend from them."""
        found: dict[int, procfs.Task] = {}
        known = self._processes
        since = min((ticks for _, ticks in known), default=0)
        for mark in self.marks:
            target = process_tree.TreeTarget(f"{mark}/".encode(), roots=known, since=since)
            found |= process_tree.find(target)[0]
        return list(found.values())

    def _left(self) -> list[procfs.Task]:
        found = {task.key: task for task in self._members()}
        if self._own:
            for task in procfs.read_all().values():
                if task.parent == os.getpid() and (self._children or task.is_dead):
                    found[task.key] = task
        return [
            task
            for key, task in found.items()
            if key not in self._there and _helper_of(task.pid) not in self._trees
        ]

    def _entries(self) -> Iterator[Path]:
        """The entries of the folders that are looked at."""
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        shared = [_SHM, Path(tempfile.gettempdir()), *([Path(runtime)] if runtime else [])]
        for folder in dict.fromkeys((*self._folders, *shared)):
            yield from _listed(folder)

    def _is_left(self, path: Path) -> bool:
        """Whether *path*, which is new, is the trees': by its folder, its holder or its name."""
        if path in self._files:
            return True
        if path.parent in self._folders:
            return not path.name.startswith(_FOREIGN)
        if path.name.startswith("phalanx"):  # phalanx-WORD-PID-...
            owner = "".join(path.name.split("-")[2:3])
            if not owner.isdigit():
                return True
            if self.pids is None:
                return int(owner) == os.getpid() or procfs.read(int(owner)) is None
            return int(owner) in self.pids  # another container may share the folder
        # Short numbers are in every name, and any number in what was drawn by chance.
        words = re.split("[^0-9A-Za-z]+", _UUID.sub("", path.name))
        pids = {str(pid) for pid in self.pids or () if pid > 99}
        return not pids.isdisjoint(words)


def _helper_of(pid: int) -> bytes:
    """The tree of which process *pid* is zygote or output collector; empty if it is neither."""
    found = _HELPER.findall(procfs.content(f"/proc/{pid}/environ") or b"")
    return found[-1] if found else b""


def _listed(folder: Path) -> Iterable[Path]:
    with suppress(OSError):  # there is none, or it is not ours to read
        return [folder / name for name in os.listdir(folder)]  # noqa: PTH208  # names only
    return []


def _links(pid: int) -> Iterator[str]:
    """The descriptors of process *pid*: paths, and sockets and pipes by their numbers."""
    for link in _listed(Path(f"/proc/{pid}/fd")):
        with suppress(OSError):  # the listing's own
            yield os.readlink(link)  # noqa: PTH115  # no use for a Path


def _held_by(pid: int) -> Iterator[Path]:
    """The files in shared memory that process *pid* has open or mapped."""
    for target in _links(pid):
        if target.startswith(f"{_SHM}/"):
            yield Path(target)
    for line in (procfs.content(f"/proc/{pid}/maps") or b"").decode(errors="replace").splitlines():
        _, _, name = line.partition(f" {_SHM}/")
        if name:
            yield _SHM / name


def _device_bytes() -> dict[str, int]:
    with closing(find_gpus()) as inventory:
        used = {gpu.uuid: inventory.used_bytes(gpu.uuid) for gpu in inventory.gpus()}
    return {uuid: count for uuid, count in used.items() if count is not None}
