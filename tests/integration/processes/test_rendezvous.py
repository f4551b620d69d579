"""Ranks meet on loopback, once per epoch, and no process exists for those who never do."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import LONG, start_thread, wait_until
from tests.support.programs import run_program

from phalanx.runtime.distributed.rendezvous import (
    Place,
    Rendezvous,
    RendezvousStore,
    StoreExited,
    init_process_group,
    rendezvous_environment,
)
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.runtime import Runtime
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.supervision import ExitKind, RuntimeFault, SpecError


class Driver:
    """A store, and what it tells."""

    def __init__(self, loop: EventLoop, launcher: Launcher) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.store = RendezvousStore(
            loop, launcher, preload=("torch",), group="tp", on_event=self.events.put
        )


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


def connect(rendezvous: Rendezvous) -> Any:
    """Return a client of the store, as each rank has one."""
    dist: Any = import_module("torch.distributed")
    return dist.TCPStore(
        rendezvous.address,
        rendezvous.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=LONG),
    )


def sum_by_environment(_: object) -> tuple[float, str]:
    import torch

    dist: Any = import_module("torch.distributed")
    dist.init_process_group("gloo")
    total = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return float(total), os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_user_code_meets_through_the_environment(make: Make, torch_runtime: Runtime) -> None:
    ex = make(runtime=torch_runtime, launch={"preload": ("torch",)})

    assert ex.collective_rpc(sum_by_environment, LONG) == [(1.0, "1")] * 2


def test_one_process_serves_every_epoch_each_apart_and_survivors_of_the_last_are_cut_off(
    driver: Driver,
) -> None:
    meetings = [driver.store.open(epoch) for epoch in (1, 2)]
    survivor = connect(meetings[1])
    survivor.set("left", "behind")
    first = driver.store.pid
    meetings.append(driver.store.open(5))
    new = connect(meetings[2])

    assert first is not None
    assert driver.store.pid == first
    assert len({meeting.port for meeting in meetings}) == 3
    assert len({meeting.prefix for meeting in meetings}) == 3
    with pytest.raises(RuntimeError):
        survivor.get("left")
    assert not new.check(["left"])
    assert on(meetings[1].port) == set()


def test_the_store_listens_on_loopback_only_and_closing_ends_it_and_tells_of_no_death(
    driver: Driver,
) -> None:
    before = listeners()
    rendezvous = driver.store.open(1)
    bound_before_told = on(rendezvous.port)

    connect(rendezvous)

    assert bound_before_told == {"0100007F"}
    assert on(rendezvous.port) == {"0100007F"}
    new = {address for address, _ in listeners() - before}
    assert new == {"0100007F"}
    pid = driver.store.pid
    assert pid is not None

    driver.store.close()
    driver.store.close()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert driver.events.empty()
    assert on(rendezvous.port) == set()


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_killed_store_is_an_event_and_the_next_epoch_has_another(
    driver: Driver, core: tuple[EventLoop, Launcher], is_reported: bool
) -> None:
    first = driver.store.open(1)
    connect(first)
    pid = driver.store.pid
    assert pid is not None
    go = threading.Event()

    def hold() -> None:
        go.wait(LONG)

    if not is_reported:  # before the next epoch is opened
        core[0].post(hold)

    os.kill(pid, signal.SIGKILL)
    event = driver.events.get(timeout=LONG) if is_reported else None
    if not is_reported:
        with open(os.pidfd_open(pid), "rb", buffering=0) as every_thread:
            assert select.select([every_thread], [], [], LONG)[0]
    second = driver.store.open(2)
    go.set()
    event = event or driver.events.get(timeout=LONG)
    connect(second)

    assert isinstance(event, StoreExited)
    assert (event.group, event.epoch, event.pid) == ("tp", 1, pid)
    assert event.reason.kind is ExitKind.KILLED
    assert driver.store.pid not in (None, pid)
    assert on(first.port) == set()


def test_a_store_outlives_sigterm_and_one_that_is_stopped_is_replaced(driver: Driver) -> None:
    client = connect(driver.store.open(1))
    pid = driver.store.pid
    assert pid is not None

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(pid, number)
    client.set("still", "there")
    assert client.check(["still"])
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: driver.store._helper.is_stopped)
    meeting = driver.store.open(2)
    assert driver.store.pid is None
    connect(meeting)

    assert driver.store.pid not in (None, pid)
    assert driver.events.empty()


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


class FailsLate:
    """A launcher that fails, once `fails` is set."""

    def __init__(self) -> None:
        self.begun, self.fails = threading.Event(), threading.Event()

    def launch(self, *_: Any, **__: Any) -> Any:
        self.begun.set()
        assert self.fails.wait(LONG)
        raise RuntimeFault("no process")


def test_a_start_that_fails_behind_the_next_epoch_leaves_that_its_listener(loop: EventLoop) -> None:
    events: queue.Queue[Any] = queue.Queue()
    launcher: Any = FailsLate()
    store = RendezvousStore(loop, launcher, group="tp", on_event=events.put)
    first = store.open(1)
    with socket.create_connection((first.address, first.port), LONG):
        assert launcher.begun.wait(LONG)
        second = store.open(2)
        launcher.fails.set()
        event = events.get(timeout=LONG)

    assert (event.pid, event.epoch) == (None, 1)
    assert on(second.port)
    store.close()
    assert not on(second.port)


def test_epochs_rise_until_the_store_is_closed_and_start_no_process_before_a_rank_connects(
    driver: Driver,
) -> None:
    for epoch in range(1, 20):
        driver.store.open(epoch)
    for wrong in (0, 18, 19):
        with pytest.raises(SpecError, match="epoch"):
            driver.store.open(wrong)
    assert driver.store.pid is None

    driver.store.close()

    with pytest.raises(RuntimeFault, match="closed"):
        driver.store.open(20)


MEETING = Rendezvous("127.0.0.1", 4242, "tp/7/", 7, "tp")


def test_the_environment_is_torchruns() -> None:
    environment = rendezvous_environment(MEETING, 3, 4)

    assert environment == {
        "RANK": "3",
        "LOCAL_RANK": "3",
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


def test_the_environment_on_a_node_says_where_among_the_nodes_a_rank_is() -> None:
    place = Place(node=7, host="b", local_rank=1, local_size=2, index=1, nodes=3)

    environment = rendezvous_environment(MEETING, 3, 5, place)

    assert environment["LOCAL_RANK"] == environment["GROUP_RANK"] == "1"
    assert environment["LOCAL_WORLD_SIZE"] == "2"
    assert environment["GROUP_WORLD_SIZE"] == "3"
    assert "GLOO_SOCKET_IFNAME" not in environment  # the node knows its own


def test_collectives_go_over_the_interface_that_the_user_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")

    assert "GLOO_SOCKET_IFNAME" not in rendezvous_environment(MEETING, 0, 2)


def test_a_process_group_without_a_rendezvous_says_why() -> None:
    with pytest.raises(RuntimeFault, match="no rendezvous"):
        init_process_group("gloo", None, 0, 2)


def test_a_rank_that_is_too_late_for_an_epoch_fails_although_its_first_look_saw_a_store() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def see_the_first() -> None:
        listener.accept()[0].close()
        listener.close()

    thread = start_thread(see_the_first)
    try:
        late = Rendezvous("127.0.0.1", listener.getsockname()[1], "tp/7/", 7, "tp")
        with pytest.raises(RuntimeFault, match="epoch 7 of tp is over"):
            init_process_group("gloo", late, 0, 2, timeout=3600)  # pytest's limit is shorter
    finally:
        thread.join()


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
