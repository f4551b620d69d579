"""Ranks meet on loopback, once per epoch, and no process exists for those who never do."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.support.programs import run_program

from phalanx.runtime.distributed.rendezvous import (
    Rendezvous,
    RendezvousStore,
    StoreExited,
    init_process_group,
    rendezvous_environment,
)
from phalanx.runtime.process.child_process import Process
from phalanx.runtime.process.launch_spec import LaunchSpec
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.runtime import Runtime
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.supervision import ExitKind, RuntimeFault, SpecError

LONG = 60.0  # seconds; no test takes them unless something is broken


class Driver:
    """A loop, a launcher and a store, and what a test wants to know of them."""

    def __init__(self, loop: EventLoop, launcher: Launcher) -> None:
        self.loop = loop
        self.launcher = launcher
        self.events: queue.Queue[Any] = queue.Queue()
        self.store = RendezvousStore(
            loop, launcher, preload=("torch",), group="tp", on_event=self.events.put
        )

    def start(self, body: str, payload: object, env: Mapping[str, str] | None = None) -> Answer:
        """Run *body* of this file in a process of its own."""
        return Answer(self.launcher, body, payload, env)


class Answer:
    """A process that runs a function of this file, and the value that it returns."""

    def __init__(
        self, launcher: Launcher, body: str, payload: object, env: Mapping[str, str] | None
    ) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended: queue.Queue[Process] = queue.Queue()
        spec = LaunchSpec(
            entry="test_rendezvous:run_body",
            payload=pickle.dumps((body, payload)),
            fds={"answer": theirs.fileno()},
            label=f"{body}-{id(self)}",
            env=None if env is None else {**os.environ, **env},
            sys_path=[str(Path(__file__).parent), *sys.path],
            preload=("torch",),
        )
        deadline = time.monotonic() + LONG
        [self.process] = launcher.launch(spec, on_exit=self._ended.put, deadline=deadline)
        theirs.close()

    def value(self) -> Any:
        """Wait for what the function returns, or raise what it raised."""
        self._ours.settimeout(LONG)
        data = self._ours.recv(1 << 16)
        self._ended.get(timeout=LONG)
        self.process.close()
        self._ours.close()
        ok, value = pickle.loads(data)
        assert ok, value
        return value


@pytest.fixture
def core(torch_runtime: Runtime) -> tuple[EventLoop, Launcher]:
    return torch_runtime.loop, torch_runtime.launcher


@pytest.fixture
def driver(core: tuple[EventLoop, Launcher]) -> Iterator[Driver]:
    driver = Driver(*core)
    yield driver
    driver.store.close()


def listeners() -> set[tuple[str, int]]:
    """Return the (address as the kernel prints it, port) of every TCP socket that listens."""
    found: set[tuple[str, int]] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with Path(table).open() as lines:
            for line in list(lines)[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, port = local.partition(":")
                if state == "0A":
                    found.add((address, int(port, 16)))
    return found


def on(port: int) -> set[str]:
    return {address for address, at in listeners() if at == port}


# --- what the ranks do, in processes of their own ---------------------------------------------


def run_body(payload: bytes, fds: Mapping[str, int]) -> None:
    """Answer with what a function of this file returns, or raises."""
    body, value = pickle.loads(payload)
    function: Callable[[Any], Any] = globals()[body]
    try:
        answer = True, function(value)
    except Exception as error:
        answer = False, repr(error)
    with socket.socket(fileno=fds["answer"]) as channel:
        channel.send(pickle.dumps(answer))


def sum_of_ranks(meeting: tuple[Rendezvous, int, int]) -> float:
    import torch

    dist: Any = import_module("torch.distributed")
    rendezvous, rank, size = meeting
    init_process_group("gloo", rendezvous, rank, size, timeout=LONG)
    total = torch.full((1,), float(rank))
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return float(total)


def sum_by_environment(_: None) -> tuple[float, str]:
    import torch

    dist: Any = import_module("torch.distributed")
    dist.init_process_group("gloo")
    total = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return float(total), os.environ["TORCHELASTIC_RESTART_COUNT"]


@contextmanager
def client(rendezvous: Rendezvous) -> Generator[Any]:
    dist: Any = import_module("torch.distributed")
    store = dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=LONG),
    )
    yield store


def leave_a_key(rendezvous: Rendezvous) -> bool:
    with client(rendezvous) as store:
        store.set("left", "behind")
        return bool(store.check(["left"]))


def outlive_the_epoch(meeting: tuple[Rendezvous, int]) -> str:
    """Hold a connection of the old epoch until the new one is open, then use it."""
    rendezvous, gate = meeting
    with client(rendezvous) as store:
        store.set("left", "behind")
        with socket.create_connection(("127.0.0.1", gate)) as signal_:
            signal_.recv(1)
        try:
            store.get("left")
        except Exception as error:
            return type(error).__name__
    return "read"


# --- the tests --------------------------------------------------------------------------------


def all_ranks(driver: Driver, rendezvous: Rendezvous, size: int) -> list[float]:
    ranks = [driver.start("sum_of_ranks", (rendezvous, rank, size)) for rank in range(size)]
    return [rank.value() for rank in ranks]


def test_each_of_several_epochs_has_an_address_and_a_prefix_of_its_own(driver: Driver) -> None:
    meetings = [driver.store.open(epoch) for epoch in (1, 2)]
    sums = [all_ranks(driver, meetings[1], 2)]
    meetings.append(driver.store.open(5))

    sums.append(all_ranks(driver, meetings[2], 2))

    assert sums == [[1.0, 1.0], [1.0, 1.0]]
    assert len({meeting.port for meeting in meetings}) == 3
    assert len({meeting.prefix for meeting in meetings}) == 3


def test_user_code_meets_through_the_environment(driver: Driver) -> None:
    rendezvous = driver.store.open(4)
    environments = [rendezvous_environment(rendezvous, rank, rank, 2) for rank in range(2)]

    ranks = [driver.start("sum_by_environment", None, env) for env in environments]

    assert [rank.value() for rank in ranks] == [(1.0, "4"), (1.0, "4")]


def test_a_group_that_never_meets_costs_no_process(driver: Driver) -> None:
    for epoch in range(1, 20):
        driver.store.open(epoch)

    driver.store.close()

    assert driver.store.pid is None


def test_the_store_listens_on_loopback_only(driver: Driver) -> None:
    before = listeners()
    rendezvous = driver.store.open(1)
    bound_before_told = on(rendezvous.port)

    driver.start("leave_a_key", rendezvous).value()

    assert bound_before_told == {"0100007F"}
    assert on(rendezvous.port) == {"0100007F"}
    new = {address for address, _ in listeners() - before}
    assert new == {"0100007F"}


def test_one_process_serves_every_epoch(driver: Driver) -> None:
    driver.start("leave_a_key", driver.store.open(1)).value()
    first = driver.store.pid

    driver.start("leave_a_key", driver.store.open(2)).value()

    assert first is not None
    assert driver.store.pid == first


def test_a_survivor_of_an_old_epoch_is_cut_off(driver: Driver) -> None:
    old = driver.store.open(1)
    with socket.create_server(("127.0.0.1", 0)) as gate:
        gate.settimeout(LONG)
        survivor = driver.start("outlive_the_epoch", (old, gate.getsockname()[1]))
        connection, _ = gate.accept()
        new = driver.store.open(2)
        driver.start("leave_a_key", new).value()  # by now the store has turned over
        connection.close()

        outcome = survivor.value()

    assert outcome != "read"
    assert on(old.port) == set()


def test_a_killed_store_is_an_event_and_the_next_epoch_has_another(driver: Driver) -> None:
    first = driver.store.open(1)
    driver.start("leave_a_key", first).value()
    pid = driver.store.pid
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    event = driver.events.get(timeout=LONG)
    sums = all_ranks(driver, driver.store.open(2), 2)

    assert isinstance(event, StoreExited)
    assert (event.group, event.epoch, event.pid) == ("tp", 1, pid)
    assert event.reason.kind is ExitKind.KILLED
    assert sums == [1.0, 1.0]
    assert driver.store.pid not in (None, pid)
    assert on(first.port) == set()


def test_closing_ends_the_process_and_tells_of_no_death(driver: Driver) -> None:
    rendezvous = driver.store.open(1)
    driver.start("leave_a_key", rendezvous).value()
    pid = driver.store.pid
    assert pid is not None

    driver.store.close()
    driver.store.close()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert driver.events.empty()
    assert on(rendezvous.port) == set()


def test_closing_while_the_process_starts_leaves_nothing(driver: Driver) -> None:
    rendezvous = driver.store.open(1)
    with socket.create_connection((rendezvous.address, rendezvous.port), LONG):
        driver.store.close()

    assert driver.store.pid is None
    assert on(rendezvous.port) == set()
    assert driver.events.empty()


def test_a_store_that_cannot_be_started_is_an_event(core: tuple[EventLoop, Launcher]) -> None:
    events: queue.Queue[Any] = queue.Queue()

    launcher = Launcher(core[0])
    launcher.close(time.monotonic() + LONG)
    store = RendezvousStore(core[0], launcher, group="tp", on_event=events.put)
    rendezvous = store.open(1)
    with socket.socket() as rank:
        rank.connect_ex((rendezvous.address, rendezvous.port))  # connected, reset: both will do
        event = events.get(timeout=LONG)
    store.close()

    assert isinstance(event, StoreExited)
    assert event.pid is None
    assert "the launcher is closed" in event.reason.detail
    assert on(rendezvous.port) == set()


@pytest.mark.parametrize("epoch", [0, 3, 2])
def test_an_epoch_that_does_not_rise_is_refused(driver: Driver, epoch: int) -> None:
    driver.store.open(3)

    with pytest.raises(SpecError, match="epoch"):
        driver.store.open(epoch)


def test_a_closed_store_opens_no_epoch(driver: Driver) -> None:
    driver.store.close()

    with pytest.raises(RuntimeFault, match="closed"):
        driver.store.open(1)


MEETING = Rendezvous("127.0.0.1", 4242, "tp/7/", 7, "tp")


def test_the_environment_is_torchruns() -> None:
    environment = rendezvous_environment(MEETING, 3, 1, 4)

    assert environment == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "tp",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4242",
        "TORCHELASTIC_RESTART_COUNT": "7",
        "TORCHELASTIC_RUN_ID": "tp",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, {"NCCL_SOCKET_IFNAME": "lo"}),
    ],
)
def test_collectives_stay_on_loopback_unless_the_user_named_an_interface(
    given: dict[str, str], added: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, given.get(name, ""))

    environment = rendezvous_environment(MEETING, 0, 0, 2)

    named = {name: value for name, value in environment.items() if name.endswith("IFNAME")}
    assert named == added


def test_a_process_group_without_a_rendezvous_says_why() -> None:
    with pytest.raises(RuntimeFault, match="no rendezvous"):
        init_process_group("gloo", None, 0, 2)


JOINS_ON_START = """
from phalanx import Executor, WorkerActor
from phalanx.errors import StartFailed
class Worker(WorkerActor):
    def on_start(self, ctx):
        ctx.init_process_group("gloo", timeout=600)
try:
    Executor(Worker, 2)
except StartFailed as error:
    print(type(error.__cause__).__name__, error.__cause__)
"""


def test_a_group_that_joins_without_a_loopback_interface_fails_its_start_and_says_so() -> None:
    if subprocess.run(["unshare", "--net", "true"], check=False).returncode:
        pytest.skip("making a network namespace is not permitted here")

    done = run_program(["unshare", "--net", sys.executable, "-c", JOINS_ON_START], timeout=4 * LONG)

    assert done.stdout.startswith("RuntimeFault 127.0.0.1"), done.stderr
    assert "bring loopback up" in done.stdout
