"""The fixture `leak_check`: a test leaves nothing behind.

Guarantees: a leak is told by what it is and where; what is on its way out is waited for; a process
that was left is ended, so that one leak does not fail every test after it.

It looks at processes (children, zombies included, and whatever carries the mark of this session: so
strays of killed drivers are found, whoever their parent is), threads, descriptors, and files: those
of this process and of dead ones in shared memory and the temporary folders, and everything in the
folders that the fixture `leak_scope` names.
"""

from __future__ import annotations

import gc
import os
import re
import select
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx.actors import Executor, WorkerActor
from phalanx.runtime import MARK, Quarry, Runtime, find_tree, kill_tree, read_task, read_tasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.runtime import Task

SESSION = uuid.uuid4().hex
"""The mark of every process that is started from here, directly or not."""

_NEEDLE = f"{SESSION}/".encode()
_SHM = Path("/dev/shm")  # noqa: S108  # looked at, not written to
_OURS = "phalanx-"
_PYTESTS = "pytest-"  # folders that pytest keeps and prunes itself
_KILL = 5.0
_LATER = (
    "\n(if a fixture of this test has started it: ask for leak_check before that fixture, as by "
    '@pytest.mark.usefixtures("leak_check"), so that it looks after the fixture has ended)'
)


@dataclass(frozen=True, slots=True)
class LeakScope:
    """Where `leak_check` looks, and for how long.

    Attributes:
        folders: In these every new entry is a leak, whoever made it: name those that nobody but
            these tests uses. Elsewhere only what phalanx has made is one.
        patience: Seconds for what is on its way out already.
    """

    folders: tuple[Path, ...] = ()
    patience: float = 15.0


@dataclass(frozen=True)
class Footprint:
    """What this process has of everything that could leak."""

    processes: frozenset[tuple[int, int]]
    threads: frozenset[int]
    files: frozenset[Path]
    descriptors: Counter[str]

    @classmethod
    def now(cls, scope: LeakScope) -> Footprint:
        """Return what there is now."""
        return cls(
            frozenset(_processes()),
            frozenset(thread.native_id or 0 for thread in threading.enumerate()),
            frozenset(_files(scope)),
            Counter(_descriptors()),
        )

    def since(self, before: Footprint) -> dict[str, object]:
        """Return what is here and was not *before*."""
        tasks = read_tasks()
        grown = {
            "processes": {
                pid: f"{tasks[pid].state} {_command(pid)!r}"
                for pid, _ in self.processes - before.processes
                if pid in tasks
            },
            "threads": [t.name for t in threading.enumerate() if t.native_id not in before.threads],
            "files": sorted(map(str, self.files - before.files)),
            "descriptors": dict(self.descriptors - before.descriptors),
        }
        return {name: value for name, value in grown.items() if value}


@pytest.fixture(scope="session")
def leak_scope() -> LeakScope:
    """Where `leak_check` looks; have a fixture of this name to say so."""
    return LeakScope()


@pytest.fixture(scope="session")
def phalanx_mark() -> Iterator[None]:
    """Mark every tree that is made from now on, here or in a process that is started from here."""
    with pytest.MonkeyPatch.context() as patch:
        outer = os.environ.get(MARK, "").rstrip(";")
        patch.setenv(MARK, f"{outer};{SESSION}/pytest;".lstrip(";"))
        yield


@pytest.fixture(scope="session")
def phalanx_runtime() -> Iterator[Runtime]:
    """One runtime for all tests: ``Executor(..., runtime=phalanx_runtime)``.

    Its zygote has imported torch, so that an executor takes tenths of a second to start.
    """

    class Idle(WorkerActor):
        """Local, so that it travels by value: its process does not import pytest."""

    with Runtime(stream=False) as runtime:
        Executor(Idle, 1, runtime=runtime).close()  # what stays is here before any test
        yield runtime


@pytest.fixture
def leak_check(request: pytest.FixtureRequest, leak_scope: LeakScope) -> Iterator[None]:
    """Fail where a test leaves processes, threads, shared memory, files or descriptors.

    What fixtures that were asked for before this one have is not counted; what they start during
    the test is, such as ranks of an executor that are restarted.
    """
    request.getfixturevalue("phalanx_mark")
    gc.collect()
    before = Footprint.now(leak_scope)
    yield
    left = _settle(before, leak_scope)
    if left:
        keys = Footprint.now(leak_scope).processes - before.processes
        if keys:
            kill_tree(Quarry(_NEEDLE, roots=keys, spare=_pids(before)), time.monotonic() + _KILL)
        pytest.fail(f"left behind: {left}{_LATER}", pytrace=False)


def _settle(before: Footprint, scope: LeakScope) -> dict[str, object]:
    """Return what is left once what was ending has ended, or its time is up."""
    deadline = time.monotonic() + scope.patience
    for key, task in _processes().items():
        if key not in before.processes and task.state != "Z":
            _await_end(task, deadline)
    for thread in threading.enumerate():
        if thread.native_id not in before.threads and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    gc.collect()
    while (left := Footprint.now(scope).since(before)) and time.monotonic() < deadline:
        time.sleep(0.01)  # a zombie that somebody is about to collect sends no word of it
        gc.collect()  # what was still held a moment ago
    return left


def _processes() -> dict[tuple[int, int], Task]:
    found, _ = find_tree(Quarry(_NEEDLE))
    children = (task for task in read_tasks().values() if task.parent == os.getpid())
    return {task.key: task for task in (*found.values(), *children)}


def _pids(before: Footprint) -> list[int]:
    return [pid for pid, _ in before.processes]


def _await_end(task: Task, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(task.pid)
    except OSError:
        return
    try:
        now = read_task(task.pid)
        if now is not None and now.key == task.key:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(pidfd)


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names only
        try:
            # Sockets and pipes are told apart by their numbers; the rest by what they are.
            yield os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115  # no use for a Path
        except OSError:
            continue  # the listing's own


def _files(scope: LeakScope) -> Iterator[Path]:
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    usual = [_SHM, Path(tempfile.gettempdir())]
    usual += [Path(runtime_folder)] if runtime_folder else []
    for folder in dict.fromkeys((*scope.folders, *usual)):
        try:
            names = os.listdir(folder)  # noqa: PTH208  # names only
        except OSError:
            continue  # there is none, or it is not ours to read
        for name in names:
            if folder in scope.folders:
                if not name.startswith(_PYTESTS):
                    yield folder / name
            elif _is_ours(name):
                yield folder / name


def _is_ours(name: str) -> bool:
    """Whether a file called *name* was made by phalanx, here or in a process that is dead."""
    if not name.startswith(_OURS):
        return False
    pids = [int(number) for number in re.findall(r"\d+", name)]
    return os.getpid() in pids or all(read_task(pid) is None for pid in pids)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
