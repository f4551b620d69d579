"""For every test: nothing is left behind. For tests of processes: a hub and a launcher."""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.actors.workers import Echo

from phalanx.actors import Executor
from phalanx.runtime import Runtime, Zmq, tree
from phalanx.runtime.hub import Hub
from phalanx.runtime.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Several ranks on a machine with one GPU would be more leases than devices. Tests that want a GPU
# say so themselves.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# A shell that runs this in the background has it ignore Ctrl-C, and so would every driver under
# test that is to be ended by one.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STRICT = {"runtime", "actors", "chaos"}

# Every test of an executor that does not choose a transport itself runs on this one.
NAMED: Any = os.environ.get("PHALANX_TEST_TRANSPORT", "local")
TRANSPORT: Any = Zmq(ipc=True) if NAMED == "ipc" else NAMED
PATIENCE = 15.0  # seconds for what is on its way out already

# A folder of our own, so that what lies about in it is ours. Its name is short: socket paths are.
TEMP = tempfile.mkdtemp(prefix="ph-", dir="/tmp")
os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = tempfile.tempdir = TEMP

# Every tree that is made in this process, or in a process it starts, lies within this mark: so
# daemons and guardians of killed drivers are found too, whoever their parent is by now.
SESSION = uuid.uuid4().hex
os.environ["PHALANX_TREE"] = f"{SESSION}/tests;"


@dataclass(frozen=True)
class Footprint:
    """What this process has of everything that could leak."""

    processes: frozenset[tuple[int, int]]
    threads: frozenset[int]
    shared_memory: frozenset[str]
    folders: frozenset[str]
    descriptors: Counter[str]

    @classmethod
    def now(cls) -> Footprint:
        return cls(
            frozenset(processes()),
            frozenset(thread.native_id or 0 for thread in threading.enumerate()),
            frozenset(path.name for path in Path("/dev/shm").iterdir()),
            frozenset(ours_in_temp()),
            Counter(descriptors()),
        )

    def since(self, before: Footprint) -> dict[str, object]:
        """Return what is here and was not *before*."""
        tasks = tree.read_all()
        commands = {
            pid: f"{tasks[pid].state} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"
            for pid, _ in self.processes - before.processes
            if pid in tasks
        }
        grown = {
            "processes": commands,
            "threads": [t.name for t in threading.enumerate() if t.native_id not in before.threads],
            "/dev/shm": sorted(self.shared_memory - before.shared_memory),
            "temp": sorted(self.folders - before.folders),
            "descriptors": dict(self.descriptors - before.descriptors),
        }
        return {name: value for name, value in grown.items() if value}


def processes() -> dict[tuple[int, int], tree.Task]:
    """Children of this process, zombies included, and everything that carries our mark."""
    found, _ = tree.find(tree.Quarry(f"{SESSION}/".encode()))
    children = (task for task in tree.read_all().values() if task.parent == os.getpid())
    return {task.key: task for task in (*found.values(), *children)}


def descriptors() -> Iterator[str]:
    for fd in tree.numbers_in("/proc/self/fd"):
        try:
            target = str(Path(f"/proc/self/fd/{fd}").readlink())
        except OSError:
            continue
        # Sockets and pipes are told apart by their numbers; the rest by what they are.
        yield target


def ours_in_temp() -> Iterator[str]:
    """What is in the temporary folder, but for pytest's own."""
    names = (path.name for path in Path(TEMP).iterdir())
    return (name for name in names if not name.startswith("pytest-"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default=1, type=int, help="of the random faults")
    parser.addoption("--faults", default=None, type=int, help="how many, in place of a test's own")


def pytest_unconfigure() -> None:
    shutil.rmtree(TEMP, ignore_errors=True)


def settle(before: Footprint, deadline: float) -> dict[str, object]:
    """Return what is left once what was ending has ended, or at *deadline*."""
    for key, task in processes().items():
        if key not in before.processes and task.state != "Z":
            await_end(task, deadline)
    for thread in threading.enumerate():
        if thread.native_id not in before.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    gc.collect()
    while (left := Footprint.now().since(before)) and time.monotonic() < deadline:
        time.sleep(0.01)  # a zombie that somebody is about to collect sends no word of it
        gc.collect()  # what was still held a moment ago
    return left


def await_end(task: tree.Task, deadline: float) -> bool:
    """Return whether *task* has ended by *deadline*."""
    try:
        pidfd = os.pidfd_open(task.pid)
    except OSError:
        return True
    try:
        now = tree.read(task.pid)
        if now is None or now.key != task.key:
            return True
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
    finally:
        os.close(pidfd)


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fail where a test leaves processes, threads, shared memory, folders or descriptors."""
    gc.collect()
    before = Footprint.now()
    yield
    left = settle(before, time.monotonic() + PATIENCE)
    if left:
        keys = Footprint.now().processes - before.processes
        if keys:  # so that one leak does not fail every test after it
            tree.kill(tree.Quarry(f"{SESSION}/".encode(), roots=keys), time.monotonic() + 5)
        pytest.fail(f"left behind: {left}")


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> None:
    if STRICT & set(Path(request.path).parts):
        request.getfixturevalue("leak_check")


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def events() -> list[Any]:
    """What the launcher has told."""
    return []


@pytest.fixture
def launcher(hub: Hub, events: list[Any]) -> Iterator[Launcher]:
    """A launcher that preloads nothing."""
    launcher = Launcher(hub, preload=(), emit=events.append)
    yield launcher
    launcher.close(time.monotonic() + PATIENCE)


def _quiet_runtime(*preload: str) -> Runtime:
    """Return a runtime all of whose processes are there, so that no test seems to leave them."""
    runtime = Runtime(console=None, stream=False)
    Executor(Echo, 1, preload=preload, runtime=runtime).close()
    Executor(Echo, 1, preload=preload, runtime=runtime, transport="zmq").close()
    return runtime


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    """One quiet runtime for the tests of executors: its zygote has imported nothing."""
    with _quiet_runtime() as runtime:
        yield runtime


@pytest.fixture(scope="session")
def torch_runtime() -> Iterator[Runtime]:
    """The same, whose zygote has imported torch."""
    with _quiet_runtime("torch") as runtime:
        yield runtime


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("both_transports") and TRANSPORT == "local":
        metafunc.parametrize("transport", ["local", "zmq"], indirect=True)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Any:
    """The transport that executors of a test run on which do not choose one."""
    return getattr(request, "param", TRANSPORT)


@pytest.fixture
def make(runtime: Runtime, transport: Any) -> Iterator[Callable[..., Executor[Any]]]:
    """Builds executors on the quiet runtime, and closes them."""
    made: list[Executor[Any]] = []

    def build(worker: Any = Echo, world_size: int | None = 2, **options: Any) -> Executor[Any]:
        options = {
            "preload": (),
            "runtime": runtime,
            "start_timeout": 30.0,
            "transport": "local" if options.get("launch") == "inline" else transport,
            **options,
        }
        executor: Executor[Any] = Executor(worker, world_size, **options)
        made.append(executor)
        return executor

    yield build
    for executor in made:
        executor.close()
