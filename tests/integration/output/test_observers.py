"""Observers attach from outside, see everything, and can do no harm."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.support.output import LONG, Console, Worker, labels_of

from phalanx.runtime.observe.event_stream import (
    DriverStream,
    Observer,
    find_drivers,
    open_stream,
)
from phalanx.runtime.observe.events import GroupUp
from phalanx.runtime.output.collector_client import OutputCollector, WorkerOutput
from phalanx.runtime.process.launcher import Launcher
from phalanx.supervision import RuntimeFault


@pytest.fixture
def collector(launcher: Launcher, console: Console) -> Iterator[OutputCollector]:
    with OutputCollector(
        launcher, console=None, out=console.fd, err=console.fd, name="mine"
    ) as collector:
        yield collector


def mine() -> DriverStream:
    (driver,) = [driver for driver in find_drivers() if driver.pid == os.getpid()]
    return driver


def attached(collector: OutputCollector, observer: Observer) -> None:
    """Return once *observer* hears *collector*: a subscription takes a moment to arrive."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        collector.emit(GroupUp(group="knock", epoch=0, world_size=1, took=0.0, at=0.0))
        if observer.next(time.monotonic() + 0.05) is not None:
            return
    raise AssertionError("the observer was never heard")


def until(observer: Observer, **wanted: Any) -> dict[str, Any]:
    """Return the first message that holds all of *wanted*."""
    deadline = time.monotonic() + LONG
    while (record := observer.next(deadline)) is not None:
        if wanted.items() <= record.items():
            return record
    raise AssertionError(f"not seen: {wanted}")


def test_a_driver_is_found_by_its_socket_and_no_folder_is_needed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, console: Console, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    name = "naïve name/" + "x" * 200

    with OutputCollector(
        launcher, console=None, out=console.fd, err=console.fd, name=name
    ) as collector:
        driver = mine()
        made = list(tmp_path.iterdir())

    assert driver.address == collector.address
    assert name.startswith(driver.name)
    assert len(driver.name) > 10
    assert made == []
    assert driver.address not in Path("/proc/net/unix").read_text()


def test_a_name_that_cannot_be_encoded_is_found_all_the_same() -> None:
    with open_stream("na\udcffme"):
        assert mine().name == "na?me"


def test_an_observer_sees_lines_records_and_events(collector: OutputCollector) -> None:
    output: WorkerOutput = collector.open_worker(labels_of(1, incarnation=4))
    with Observer(mine()) as observer:
        attached(collector, observer)

        code = "print('out', flush=True); input(); log = worker_logger(log, labels);"
        code += "log.info('phalanx.stream_closed', kind='event'); log.info('after')"
        worker = Worker(output, code)
        collector.emit(GroupUp(group="tp", epoch=2, world_size=1, took=0.0, at=0.0))

        line = until(observer, kind="stdout", text="out")
        assert (line["rank"], line["incarnation"], line["group"]) == (1, 4, "tp")
        worker.go()
        # A worker's record does not end the stream, whatever it says.
        assert "after" in (record.get("event") for record in observer)
        worker.wait()
    with Observer(mine()) as observer:
        attached(collector, observer)
        collector.log.info("later", n=1)
        collector.emit(GroupUp(group="tp", epoch=3, world_size=1, took=0.0, at=0.0))
        assert until(observer, event="later")["kind"] == "event"
        assert until(observer, epoch=3)["event"] == "phalanx.group_up"
        assert observer.missed == 0


def test_what_no_observer_subscribes_to_is_not_published(collector: OutputCollector) -> None:
    output = collector.open_worker(labels_of(0))
    with Observer(mine(), watch=True) as observer:
        attached(collector, observer)
        collector.emit(GroupUp(group="tp", epoch=2, world_size=1, took=0.0, at=0.0))
        before = until(observer, epoch=2)

        Worker(output, "for number in range(10): print(number)").wait()
        drained = output.drain(time.monotonic() + LONG)
        collector.emit(GroupUp(group="tp", epoch=3, world_size=1, took=0.0, at=0.0))
        after = until(observer, epoch=3)

    assert drained
    assert after["seq"] == before["seq"] + 1


def test_an_observer_goes_on_after_the_collector_was_replaced(collector: OutputCollector) -> None:
    with Observer(mine()) as observer:
        attached(collector, observer)
        assert collector.pid is not None
        os.kill(collector.pid, signal.SIGKILL)

        attached(collector, observer)


def test_an_observer_that_does_not_read_slows_nobody_and_knows_what_it_missed(
    collector: OutputCollector,
) -> None:
    output = collector.open_worker(labels_of(0))
    with Observer(mine()) as observer:
        attached(collector, observer)

        worker = Worker(output, "for i in range(30000): print(i)\n")
        code = worker.wait()
        drained = output.drain(time.monotonic() + LONG)
        seen = 0
        while observer.next(time.monotonic() + 0.2) is not None:
            seen += 1
        attached(collector, observer)  # something after the gap, so that it shows

    assert (code, drained) == (0, True)
    assert observer.missed > 0
    assert seen + observer.missed >= 30000


def test_an_observer_of_a_dead_driver_is_refused() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    with pytest.raises(RuntimeFault, match="has ended"):
        Observer(DriverStream(pid=gone.pid, name="", started_at=0.0, address="nowhere"))


def test_a_socket_of_another_user_or_with_nobody_behind_it_is_passed_over(
    collector: OutputCollector,
) -> None:
    if os.geteuid():
        pytest.skip("only root can be two users")
    head = "phalanx-stream-0"
    addresses = [
        f"{head}-1.0-{os.getpid()}-evil",
        f"{head}-1.0-{os.getpid()}-deaf",
        f"{head}-x-y-z",
    ]
    sockets = [socket.socket(socket.AF_UNIX) for _ in addresses]
    for one, address in zip(sockets, addresses, strict=True):
        one.bind(f"\0{address}")
    evil, _, odd = sockets
    odd.listen()
    os.seteuid(65534)
    evil.listen()  # the kernel notes whose it is
    os.seteuid(0)

    found = [driver.address for driver in find_drivers()]

    for one in sockets:
        one.close()
    assert collector.address in found
    assert not set(addresses) & set(found)


def test_nothing_is_heard_from_another_process_under_the_name_of_a_driver_that_has_ended() -> None:
    code = """
import sys, socket
listener = socket.socket(socket.AF_UNIX); listener.bind("\\0" + sys.argv[1]); listener.listen()
print(flush=True); input()
"""
    address = f"phalanx-stream-{os.geteuid()}-1.0-{os.getpid()}-shared"
    driver = subprocess.Popen(
        [sys.executable, "-c", code, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    driver.stdout.readline()
    (found,) = [one for one in find_drivers() if one.address == address]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    impostor = context.socket(zmq.PUB)
    impostor.setsockopt(zmq.LINGER, 0)
    with Observer(found) as observer:
        driver.kill()
        driver.communicate()
        impostor.bind(f"ipc://@{address}")
        lie = [b"event", json.dumps({"kind": "event", "event": "lie"}).encode()]

        received = observer.next(time.monotonic() + LONG)
        for _ in range(20):  # as it is until zmq has connected again, too
            impostor.send_multipart(lie)
            received = received or observer.next(time.monotonic() + 0.05)

    impostor.close()
    context.term()
    assert received is None


def test_without_a_stream_there_is_no_socket(launcher: Launcher, console: Console) -> None:
    with OutputCollector(
        launcher, console=None, stream=False, out=console.fd, err=console.fd
    ) as collector:
        assert collector.address is None
        assert os.getpid() not in [driver.pid for driver in find_drivers()]


def test_a_stream_that_cannot_be_opened_is_told_and_all_else_works(
    launcher: Launcher, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "phalanx.runtime.observe.event_stream._LONGEST", 110
    )  # one the kernel does not take

    with OutputCollector(
        launcher, console="json", out=console.fd, err=console.fd, name="x" * 200
    ) as collector:
        record = console.record(lambda r: r["event"] == "phalanx.stream_unavailable")
        collector.log.info("alive")

        assert "too long" in record["problem"]
        assert console.record(lambda r: r["event"] == "alive")


def test_the_driver_never_imports_zmq() -> None:
    code = """
import sys
from phalanx.runtime.output.collector_client import OutputCollector
from phalanx.runtime.process.launcher import Launcher
from phalanx.runtime.threads.event_loop import EventLoop
with OutputCollector(Launcher(EventLoop(), preload=()), console=None): pass
assert "zmq" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
