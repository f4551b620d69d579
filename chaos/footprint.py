"""What a process has of everything that could leak, and what of it was not there before.

Guarantees: only what this run can have left is told: processes by the marks of its trees, files by
our names or those of its processes, and what it was seen to make; what other programs of the
machine do meanwhile is not.

Left to others: seeing what it makes (`belongings`).
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.runtime import find_gpus, read_tasks

from .belongings import SHM
from .journal import now
from .parts import trees_of
from .referee_records import Left

if TYPE_CHECKING:
    from collections.abc import Collection

_PATIENCE = 10.0  # seconds for what is on its way out already
_LOOK_AGAIN = 0.05
_DEVICE_SLACK_BYTES = 64 << 20
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names only
        try:
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1  # noqa: PTH115  # no use for a Path
        except OSError:
            continue  # the listing's own
    return found


def _folders() -> list[Path]:
    every = (SHM, Path(tempfile.gettempdir()), Path(os.environ.get("XDG_RUNTIME_DIR", "/")))
    return [folder for folder in dict.fromkeys(every) if folder.is_dir() and folder != Path("/")]


def _files() -> frozenset[Path]:
    found: set[Path] = set()
    for folder in _folders():
        try:
            found.update(folder.iterdir())
        except OSError:
            continue  # not ours to read
    return frozenset(found)


def _device_bytes() -> dict[str, int]:
    inventory = find_gpus()
    try:
        used = {gpu.uuid: inventory.used_bytes(gpu.uuid) for gpu in inventory.gpus()}
    finally:
        inventory.close()
    return {uuid: count for uuid, count in used.items() if count is not None}


@dataclass(frozen=True)
class Footprint:
    """What there is before a run."""

    processes: frozenset[tuple[int, int]]
    threads: frozenset[int]
    files: frozenset[Path]
    descriptors: Counter[str] = field(default_factory=Counter[str])
    devices: dict[str, int] = field(default_factory=dict[str, int])
    trees: frozenset[str] = frozenset()

    @classmethod
    def now(cls, *, devices: bool = False) -> Footprint:
        """Return what there is now."""
        return cls(
            frozenset(task.key for task in read_tasks().values()),
            frozenset(thread.ident or 0 for thread in threading.enumerate()),
            _files(),
            _descriptors(),
            _device_bytes() if devices else {},
            frozenset(trees_of(os.getpid())),
        )

    def left(
        self,
        trees: set[str],
        pids: set[int],
        made: set[Path],
        kin: Collection[tuple[int, int]] = (),
        *,
        own: bool = True,
    ) -> list[Left]:
        """Return what is there still, and was not then; waits for what is on its way out.

        Args:
            trees: The marks of the run's trees.
            pids: Every process the run had.
            made: Files that the run was seen to make.
            kin: Processes (pid, ticks) that its workers were seen to start.
            own: Whether this process is the driver, whose threads and descriptors count.
        """
        deadline = time.monotonic() + _PATIENCE
        while found := self._left(trees, pids, made, kin, own=own):
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_AGAIN)
        return found

    def _left(
        self,
        trees: set[str],
        pids: set[int],
        made: set[Path],
        kin: Collection[tuple[int, int]],
        *,
        own: bool,
    ) -> list[Left]:
        strays = self._strays(trees, kin, own=own)
        found = [Left(at=now(), what="process", name=name) for name in strays]
        numbers = {str(pid) for pid in {*pids, os.getpid()}}
        there = _files() | frozenset(path for path in made if path.exists())
        for path in sorted(there - self.files):
            if path in made or _is_named_for(path.name, numbers):
                what = "shared memory" if path.parent == SHM else "file"
                found.append(Left(at=now(), what=what, name=str(path)))
        if own:
            found += [
                Left(at=now(), what="thread", name=thread.name)
                for thread in threading.enumerate()
                if thread.ident not in self.threads
            ]
            for name, count in (_descriptors() - self.descriptors).items():
                found.append(Left(at=now(), what="descriptor", name=f"{name} ({count})"))
        for uuid, used in (_device_bytes() if self.devices else {}).items():
            more = used - self.devices.get(uuid, used)
            if more > _DEVICE_SLACK_BYTES:
                found.append(Left(at=now(), what="device memory", name=f"{uuid}: {more} bytes"))
        return found

    def _strays(self, trees: set[str], kin: Collection[tuple[int, int]], *, own: bool) -> list[str]:
        found: list[str] = []
        for task in read_tasks().values():
            if task.key in self.processes or task.is_kernel_thread:
                continue
            if task.state in ("Z", "X"):
                if own and task.parent == os.getpid():
                    found.append(f"{task.pid} (a zombie)")
                continue
            try:
                environ = Path(f"/proc/{task.pid}/environ").read_bytes()
                command = Path(f"/proc/{task.pid}/cmdline").read_bytes()
            except OSError:
                continue
            is_marked = any(_is_of(tree, environ, keeps=tree in self.trees) for tree in trees)
            if is_marked or task.key in kin:
                shown = command.replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"{task.pid} {shown[:120]}")
        return found


def _is_of(tree: str, environ: bytes, *, keeps: bool) -> bool:
    """Whether a process with *environ* is of *tree*, and should not outlive the run.

    A tree that was there before the run *keeps* its zygote and its log process, which may be new.
    """
    if keeps and re.search(rb"/\d+\.(zygote|scribe);", environ):
        return False
    return f"{tree}/".encode() in environ


def _is_named_for(name: str, pids: set[str]) -> bool:
    """Whether a file called *name* belongs to one of *pids*: ours are phalanx-WORD-PID-...

    One of ours that names no process is nobody else's. One that names another may belong to a
    program in another container, which shares the folder and not the numbers.
    """
    if name.startswith("phalanx"):
        owner = name.split("-")[2:3]
        return owner == [] or not owner[0].isdigit() or owner[0] in pids
    # Short numbers are in every name, and any number in what was drawn by chance.
    words = re.split("[^0-9A-Za-z]+", _UUID.sub("", name))
    return any(word in pids for word in words if len(word) > 2)
