"""Logging goes its own way, never raises, and never waits for ever."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.programs import run_python

from phalanx.runtime.observe.events import WorkerLabels
from phalanx.runtime.observe.log_channel import (
    MAX_RECORD,
    LogChannel,
    channel_logger,
    encode_record,
    worker_logger,
)

LABELS = WorkerLabels(child="root/tp/1", group="tp", rank=1, incarnation=2, epoch=5)


class Pair:
    """Both ends of a log channel."""

    def __init__(self) -> None:
        self.reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reader.settimeout(30)
        self.fd = writer.detach()

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.reader.recv(1 << 20))
        return record


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.reader.close()


def test_a_worker_s_record_carries_its_labels_and_none_below_the_level_is_sent(
    pair: Pair,
) -> None:
    log = worker_logger(pair.fd, LABELS)

    log.debug("quiet")
    log.info("step.done", loss=0.5)

    record = pair.record()
    assert record.pop("timestamp").endswith("+00:00")
    assert record == {
        "event": "step.done",
        "level": "info",
        "loss": 0.5,
        "group": "tp",
        "rank": 1,
        "incarnation": 2,
        "epoch": 5,
        "pid": os.getpid(),
    }


def test_an_exception_is_a_structure_without_the_values_of_locals(pair: Pair) -> None:
    log = worker_logger(pair.fd, LABELS)

    try:
        secret = "hunter2".upper()
        {secret: 1}["missing"]
    except KeyError:
        log.exception("failed")

    record = pair.record()
    assert record["level"] == "error"
    assert record["exception"][0]["exc_type"] == "KeyError"
    assert record["exception"][0]["frames"][-1]["name"] == (
        "test_an_exception_is_a_structure_without_the_values_of_locals"
    )
    assert "HUNTER2" not in json.dumps(record)


class Awkward:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_what_cannot_be_shown_does_not_raise_into_the_worker(pair: Pair) -> None:
    log = worker_logger(pair.fd, LABELS)
    circle: list[Any] = []
    circle.append(circle)

    log.info("odd", thing=Awkward(), circle=circle, keys={(1, 2): 3}, lone="\ud800")

    record = pair.record()
    assert record["event"] == "odd"
    assert record["group"] == "tp"


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=8
)


@given(
    st.dictionaries(
        st.text(min_size=1), json_values | st.binary() | st.text().map(lambda text: text * 9000)
    )
)
def test_any_record_is_json_of_bounded_size(record: dict[str, Any]) -> None:
    data = encode_record({"event": "e", **record})

    assert len(data) <= MAX_RECORD
    assert isinstance(json.loads(data), dict)


def test_a_record_past_the_limit_keeps_its_name_and_short_fields(pair: Pair) -> None:
    log = worker_logger(pair.fd, LABELS)

    log.info("big", small=1, text="x" * 300_000)

    record = pair.record()
    assert (record["event"], record["small"], record["group"]) == ("big", 1, "tp")
    assert record["truncated"] > 300_000
    assert len(record["text"]) == 4096


def test_a_record_past_the_limit_keeps_its_structure() -> None:
    ended = {f"group {number}": "x" * 3000 for number in range(64)}
    report = {"rank": 1, "reason": {"kind": "crash", "detail": "y" * 300_000}, "logs": ["z"]}

    many = json.loads(encode_record({"event": "many", "ended": ended}))
    long = json.loads(encode_record({"event": "long", "report": report}))

    assert json.loads(encode_record({"n": 1, "list": [0.5] * 100_000}))["list"] == [0.5] * 4096
    assert many["ended"] == dict.fromkeys(ended, "x" * 256)
    report["reason"] = {"kind": "crash", "detail": "y" * 4096}
    assert long["report"] == report


def test_a_number_of_thousands_of_digits_does_not_raise_into_the_worker(pair: Pair) -> None:
    log = worker_logger(pair.fd, LABELS)

    log.info("huge", number=10**5000)

    record = pair.record()
    assert (record["event"], record["rank"]) == ("huge", 1)


def test_a_channel_nobody_reads_drops_and_tells_how_many(pair: Pair) -> None:
    channel = LogChannel(pair.fd, where="worker", room_timeout=0.01)
    data = json.dumps({"event": "x" * 10_000}).encode()
    sent = sum(channel.send(data) for _ in range(200))

    received = [pair.record() for _ in range(sent)]
    assert channel.send(b'{"event": "again"}')

    assert 0 < sent < 200
    assert len(received) == sent
    dropped = pair.record()
    assert dropped["event"] == "phalanx.lines_dropped"
    assert (dropped["where"], dropped["lines"]) == ("worker", 200 - sent)
    assert pair.record()["event"] == "again"
    channel.close()


def test_a_record_of_a_finalizer_in_the_middle_of_another_is_dropped(pair: Pair) -> None:
    channel = LogChannel(pair.fd, where="worker")
    channel._dropped = 1
    with channel._lock:
        assert not channel.send(b"{}")

    assert channel.send(b'{"event": "next"}')
    assert pair.record()["lines"] == 2
    channel.close()


def test_logging_after_the_reader_or_the_descriptor_is_gone_is_silent(pair: Pair) -> None:
    log = worker_logger(pair.fd, LABELS)

    pair.reader.close()
    log.info("into the void")
    os.close(pair.fd)
    log.info("from a descriptor that user code closed")

    # The logger closes it again when it goes; give it one that may be closed.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, pair.fd)
    os.close(null)


def test_the_user_s_own_structlog_and_logging_stay_as_they_were() -> None:
    code = """
import logging, os, socket, structlog
said = []
structlog.configure(processors=[lambda _, __, e: said.append(dict(e)) or repr(e)])
logging.basicConfig(format="MINE %(message)s")
before = (structlog.get_config(), list(logging.root.handlers), logging.root.level)
from phalanx.runtime.observe.events import WorkerLabels
from phalanx.runtime.observe.log_channel import LogChannel, channel_logger, worker_logger
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel_logger(LogChannel(os.dup(a.fileno()), where="driver")).warning("ours")
worker_logger(os.dup(a.fileno()), WorkerLabels(child="c", group="g")).warning("ours too")
structlog.get_logger().info("theirs")
logging.warning("theirs too")
assert said == [{"event": "theirs"}], said
assert before == (structlog.get_config(), list(logging.root.handlers), logging.root.level)
"""
    done = run_python("-c", code)

    assert (done.returncode, done.stderr) == (0, "MINE theirs too\n")


def test_the_driver_s_records_carry_what_was_bound(pair: Pair) -> None:
    log = channel_logger(LogChannel(pair.fd, where="driver")).bind(executor="tp")

    log.warning("slow", seconds=3.5)

    record = pair.record()
    assert (record["executor"], record["seconds"], record["level"]) == ("tp", 3.5, "warning")
