"""Whatever workers write, and whoever dies or stops reading: nobody hangs, nothing is torn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.output import LONG, Console, Worker, labels_of
from tests.support.processes import soon
from tests.support.rank_faults import wait_stopped

from phalanx.runtime.observe.events import GroupDown, GroupUp, WorkerStarted
from phalanx.runtime.output.collector_client import OutputCollector
from phalanx.runtime.process import helper
from phalanx.supervision import RuntimeFault, SupervisorGaveUp

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime.output.collector_client import WorkerOutput
    from phalanx.runtime.process.launcher import Launcher

    Start = Callable[[str], tuple[Worker, WorkerOutput]]


def text_is(text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: record.get("text") == text


def event_is(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: record.get("event") == name


def open_fds() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_text_names_the_writer_of_a_line_and_a_record_that_cannot_be_shown_ends_no_output(
    launcher: Launcher, console: Console
) -> None:
    with OutputCollector(
        launcher, console="text", out=console.fd, err=console.fd, stream=False
    ) as collector:
        pid = collector.pid
        output = collector.open_worker(labels_of(3, incarnation=2, coordinates="dp=1,tp=1"))
        worker = Worker(
            output,
            """
import socket
print("hello", flush=True); input()
channel = socket.socket(fileno=log)
for depth in range(700, 1000, 5):
    channel.send(b'{"timestamp": ' + b"[" * depth + b"]" * depth + b"}")
worker_logger(os.dup(log), labels).info("mine", exception=["a", 1])
channel.send(b'{"event": "sane"}')
""",
        )
        line = console.until(lambda line: line.endswith("hello"))
        worker.go()
        worker.wait()
        console.until(lambda line: "sane" in line)
        assert collector.pid == pid

    assert line == f"[tp/3 dp=1,tp=1 #2 {worker.pid}] hello"
    assert any(" mine" in line for line in console.lines)


def test_eight_workers_at_once_lose_no_line_and_tear_none(
    console: Console, worker: Start, collector: OutputCollector
) -> None:
    code = """
for number in range(100):
    os.write(1 + number % 2, b"%d " % number + b"x" * (number * 40) + b"\\n")
"""
    workers = [worker(code)[0] for _ in range(8)]
    seen: dict[int, set[int]] = {rank: set() for rank in range(8)}

    def count(record: dict[str, Any]) -> bool:
        number, _, filling = record["text"].partition(" ")
        assert filling == "x" * (int(number) * 40)
        assert int(number) not in seen[record["rank"]]
        seen[record["rank"]].add(int(number))
        return sum(map(len, seen.values())) == 8 * 100

    console.record(count)

    assert [one.wait() for one in workers] == [0] * 8


def test_a_worker_killed_within_a_line_leaves_that_part_of_it(
    console: Console, worker: Start
) -> None:
    one, output = worker("os.write(1, b'whole\\nhalf a li'); os.write(2, b'!\\n'); input()")
    console.record(text_is("!"))

    one.kill()
    drained = output.drain(soon())

    assert drained
    assert output.tail().stdout == "whole\nhalf a li"
    assert console.record(text_is("half a li"))["kind"] == "stdout"


def test_a_killed_collector_is_replaced_and_reads_what_was_written_meanwhile(
    console: Console, worker: Start, collector: OutputCollector
) -> None:
    one, output = worker("""
log = worker_logger(log, labels)
print("before", flush=True); input()
print("after", flush=True); log.info("also.this")
""")
    console.record(text_is("before"))
    first = collector.pid
    assert first is not None

    os.kill(first, signal.SIGKILL)
    one.go()
    one.wait()
    drained = output.drain(soon())

    assert drained
    assert output.tail().stdout == "before\nafter\n"
    assert [json.loads(line)["event"] for line in output.tail().logs] == ["also.this"]
    assert collector.pid != first
    assert console.record(event_is("phalanx.helper_replaced"))["pid"] == collector.pid


def test_a_driver_stderr_that_nobody_reads_stops_no_worker(console: Console, worker: Start) -> None:
    total = 12_000  # of 2 KiB: more than the collector holds
    one, output = worker(f"for i in range({total}): print('x' * 2048, 'line', i, file=sys.stderr)")

    code = one.wait()  # nobody has read the console so far, and it is a pipe of 64 KiB

    assert code == 0
    assert output.drain(soon())
    assert output.tail().stderr.endswith(f"line {total - 1}\n")
    dropped = console.record(event_is("phalanx.lines_dropped"))
    shown = sum(1 for line in console.lines if "xx line " in line)
    assert dropped["lines"] > 0
    assert shown + dropped["lines"] == total


def test_garbage_in_any_form_and_a_line_without_end_stop_no_output(
    console: Console, worker: Start, collector: OutputCollector
) -> None:
    pid = collector.pid
    one, output = worker("""
import socket
os.write(1, bytes(range(256)) * 64 + b"\\n")
os.write(2, b"z" * 3_000_000)
os.write(1, b"\\x1b[2J\\x07 end\\n")
input()
channel = socket.socket(fileno=log)
deep = b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"
for garbage in (b"\\xff\\xfe", b"[1, 2]", b"null", b"[" * 50000, deep, b'{"level": ["x"]}'):
    channel.send(garbage)
channel.send(b'{"event": "sane"}')
""")

    line = console.record(lambda record: str(record.get("text", "")).endswith(" end"))["text"]
    one.go()
    console.record(event_is("sane"))

    assert line == "\\x1b[2J\\x07 end"
    assert sum("phalanx.malformed_record" in line for line in console.lines) == 5
    assert one.wait() == 0
    assert output.drain(soon())
    assert output.tail().stderr == "z" * 65536
    assert collector.pid == pid


def test_events_of_the_driver_come_out_in_order_with_their_fields(
    console: Console, collector: OutputCollector
) -> None:
    events = (
        WorkerStarted(child="root/tp/0", group="tp", rank=0, incarnation=1, epoch=1, pid=7, at=1.5),
        GroupUp(group="tp", epoch=1, world_size=1, took=0.25, at=2.0),
        GroupDown(group="tp", epoch=1, cause="rank 0 died", at=3.0),
    )

    for event in events:
        collector.emit(event)
    collector.log.info("driver.own", answer=42)

    assert console.record(event_is("driver.own"))["answer"] == 42
    seen = [json.loads(line) for line in console.lines[:-1]]
    assert [record["event"] for record in seen] == [event.event for event in events]
    assert all("at" not in record and "timestamp" in record for record in seen)
    assert seen[1]["took"] == 0.25


def test_a_closed_collector_takes_no_worker_and_has_the_driver_show_events_if_anybody(
    launcher: Launcher, console: Console, collector: OutputCollector
) -> None:
    collector.close()
    with OutputCollector(launcher, console=None, out=console.fd, err=console.fd) as silent:
        pass

    silent.emit(SupervisorGaveUp("top", 1.0, "b", "not to be shown"))
    collector.emit(SupervisorGaveUp("top", 1.0, "a", "more than 3 restarts in 60 s"))

    record = console.record(event_is("phalanx.supervisor_gave_up"))
    assert (record["kind"], record["level"], record["child"]) == ("event", "critical", "a")
    assert "timestamp" in record
    with pytest.raises(RuntimeFault, match="closed"):
        collector.open_worker(labels_of(0))


def test_a_stopped_collector_makes_drain_return_at_its_deadline_and_is_replaced(
    worker: Start, collector: OutputCollector
) -> None:
    one, output = worker("print('x')")
    one.wait()
    stopped = collector.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    wait_stopped(stopped)

    in_time = output.drain(time.monotonic() + 0.05)
    later = output.drain(soon())

    assert (in_time, later) == (False, True)
    assert collector.pid not in (None, stopped)


def test_a_collector_that_is_stopped_and_takes_no_message_is_replaced(
    worker: Start, collector: OutputCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper, "_SEND_TIMEOUT", 0.2)
    _, output = worker("input()")
    stopped = collector.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)

    def talk() -> None:
        while collector.pid == stopped:
            output.label()  # more than its socket holds

    talking = threading.Thread(target=talk, daemon=True)
    talking.start()
    talking.join(LONG)
    waits = talking.is_alive()
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)

    assert not waits


def test_close_shows_what_was_written_and_leaves_nothing(
    launcher: Launcher, console: Console
) -> None:
    launcher.warm()
    before = open_fds()
    collector = OutputCollector(launcher, console="json", out=console.fd, err=console.fd)
    output = collector.open_worker(labels_of(0))
    worker = Worker(output, "print('last thing')")
    worker.wait()
    pid = collector.pid

    collector.close()

    assert console.record(text_is("last thing"))
    assert open_fds() == before
    assert not Path(f"/proc/{pid}").exists()
    collector.close()  # twice is once
    output.close()


def test_workers_that_come_and_go_leak_no_descriptor_anywhere(collector: OutputCollector) -> None:
    first = collector.open_worker(labels_of(0))
    assert first.drain(soon())
    mine, its = open_fds(), len(list(Path(f"/proc/{collector.pid}/fd").iterdir()))

    for number in range(50):
        output = collector.open_worker(labels_of(1, incarnation=number))
        output.close_child_ends()
        output.close()
    assert first.drain(soon())

    assert open_fds() == mine
    assert (
        len(list(Path(f"/proc/{collector.pid}/fd").iterdir())) <= its + 1
    )  # the answer to drain, still open


def test_a_forked_child_of_the_driver_cannot_touch_its_parent_s_collector(
    console: Console, worker: Start, collector: OutputCollector
) -> None:
    one, output = worker("input(); print('still read')")
    before = open_fds()

    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            collector.emit(GroupUp(group="child", epoch=1, world_size=1, took=0.1, at=0.0))
            output.close()
            collector.close()
            status = 0 if len(open_fds()) < len(before) - 5 else 2
        os._exit(status)
    _, status = os.waitpid(child, 0)
    one.go()
    one.wait()

    assert os.waitstatus_to_exitcode(status) == 0
    assert output.drain(soon())
    assert output.tail().stdout == "still read\n"
    assert console.record(text_is("still read"))
    assert not any('"child"' in line and "group_up" in line for line in console.lines)
