"""For every test: nothing is left behind. For tests of processes: a loop and a launcher."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.drivers import Driver
from tests.support.options import with_defaults
from tests.support.processes import Starter
from tests.support.transport import TRANSPORT
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch
from phalanx.runtime import Runtime
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.testing import LeakScope

# Several ranks on a machine with one GPU would be more leases than devices. Tests that want a GPU
# say so themselves.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# A shell that runs this in the background has it ignore Ctrl-C, and so would every driver under
# test that is to be ended by one.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Installed, it is loaded by its entry point; this also serves a source tree that is not.
pytest_plugins = ["phalanx.testing", "pytester"]

# Folders whose tests have no leak check: they start programs of their own, or no process.
LENIENT = {"unit", "supervision", "cli", "benchmarks", "examples", "conformance", "vllm", "gpu"}

CLOSE_TIMEOUT = 15.0  # seconds for what is on its way out already

# A folder of our own, so that what lies about in it is ours. Its name is short: socket paths are.
TEMP = tempfile.mkdtemp(prefix="ph-", dir="/tmp")
os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = tempfile.tempdir = TEMP
# torch keeps what it has compiled, by default where files that are left count.
COMPILED = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="phc-", dir="/tmp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default=1, type=int, help="of the random faults")
    parser.addoption("--calls", default=None, type=int, help="how many, for the accounts of calls")
    parser.addoption("--faults", default=None, type=int, help="how many, in place of a test's own")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed") or 0)


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """The number of faults: as asked on the command line, else the test's own."""
    asked = request.config.getoption("--faults")
    return lambda own: own if asked is None else int(asked)


def pytest_collection_finish() -> None:
    """Have the leak detector's collections pass over what imports and pytest have made."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    for folder in (TEMP, COMPILED):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def phalanx_leak_scope() -> LeakScope:
    return LeakScope(folders=(Path(TEMP), Path("/dev/shm")))


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> None:
    if Path(request.path).parent.name not in LENIENT:
        request.getfixturevalue("phalanx_leak_check")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that workers wait for."""
    return tmp_path / "gate"


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def events() -> list[Any]:
    """What the launcher has told."""
    return []


@pytest.fixture
def launcher(loop: EventLoop, events: list[Any]) -> Iterator[Launcher]:
    """A launcher that preloads nothing."""
    launcher = Launcher(loop, preload=(), emit=events.append)
    yield launcher
    launcher.close(time.monotonic() + CLOSE_TIMEOUT)


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """Runs drivers. Of one that has ended nothing may be left at the end."""
    with contextlib.ExitStack() as drivers:

        def start(*words: str, prefix: Sequence[str] = ()) -> Driver:
            driver = Driver(*words, prefix=prefix)
            drivers.callback(driver.close)
            return driver

        yield start


@pytest.fixture
def starter(launcher: Launcher) -> Iterator[Starter]:
    starter = Starter(launcher)
    yield starter
    starter.line.close()


def _quiet_runtime(*preload: str) -> Runtime:
    """Return a runtime all of whose processes are there, so that no test seems to leave them."""
    runtime = Runtime(console=None, stream=False)
    Executor(Echo, 1, launch=Launch(preload=preload), runtime=runtime).close()
    Executor(Echo, 1, launch=Launch(preload=preload, transport="zmq"), runtime=runtime).close()
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
def make(
    request: pytest.FixtureRequest, runtime: Runtime, transport: Any
) -> Iterator[Callable[..., Executor[Any]]]:
    """Builds executors on the quiet runtime, and closes them.

    A module's ``USUAL`` are the options of its executors that its tests do not give.
    """
    made: list[Executor[Any]] = []
    usual: dict[str, Any] = {
        "worker": Echo,
        "world_size": 2,
        **getattr(request.module, "USUAL", {}),
    }
    own, size = usual.pop("worker"), usual.pop("world_size")

    def build(worker: Any = own, world_size: int | None = size, **options: Any) -> Executor[Any]:
        reached = "local" if options.get("launch") == "inline" else transport
        options = with_defaults(
            with_defaults(options, **usual),
            launch={"preload": (), "transport": reached},
            limits={"start": 30.0},
            runtime=runtime,
        )
        executor: Executor[Any] = Executor(worker, world_size, **options)
        made.append(executor)
        return executor

    yield build
    for executor in made:
        executor.close()
