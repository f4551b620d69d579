"""The scribe: the process that reads what is written, and keeps, shows and publishes it.

Guarantees: one loop that never waits for anything but input, so that no worker stands still because
somebody else does not read; a worker's last words are in its tail before they are shown; records
of the driver come in the order they were sent. It ends when the driver closes it or is gone.

Left to others: replacing it when it dies, and everything it was reading (the driver keeps
duplicates of all its descriptor_limit), see `scribe.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, Final, cast

from phalanx.runtime.event import fields
from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.observe.events import LinesDropped, StreamUnavailable
from phalanx.runtime.observe.labels import WorkerLabels
from phalanx.runtime.observe.log_channel import LEVELS, timestamp
from phalanx.runtime.observe.render import (
    prefix_of,
    render_json,
    render_lines,
    render_record,
    text_of,
)
from phalanx.runtime.observe.status import GLANCES

from .reader import Intake, read_records
from .tail_buffer import Lane, Tail
from .writer import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime.observe.publisher import Publisher

_EVENTS_AT_ONCE: Final = 256
_ALL_EVENTS: Final = 100_000  # more than a socket buffer holds
_LOOK: Final = 1.0  # seconds between looks at the driver, while somebody watches
_LAST_FLUSH: Final = 1.0  # seconds for a terminal that does not read, once the driver is gone


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Run the scribe; *payload* and *fds* are what `Scribe` hands over. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those who tell the story leave last
    descriptor_limit.raise_limit()  # it holds six for each worker
    scribe = _ScribeLoop(json.loads(payload), dict(fds))
    try:
        scribe.run()
    finally:
        scribe.close()
    return 0


class _ScribeLoop:
    def __init__(self, options: dict[str, Any], fds: dict[str, int]) -> None:
        self._console: str | None = options["console"]
        self._level = LEVELS[options["level"]]
        self._listener = fds.get("stream")
        self._control = socket.socket(fileno=fds["control"])
        self._events = fds["events"]
        self._wish = fds.get("wish")
        self._next_look = 0.0
        # Two writers to one pipe (2>&1) would cut each other's long lines in two.
        shared = os.path.samestat(os.fstat(fds["out"]), os.fstat(fds["err"]))
        self._out = Sink(fds["out"])
        self._err = self._out if shared else Sink(fds["err"])
        self._sinks = (
            {"stdout": self._out} if shared else {"stdout": self._out, "stderr": self._err}
        )
        self._intakes: dict[int, Intake] = {}  # by the driver's key for the worker
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._waiting: set[int] = set()  # sinks in the epoll
        self._publisher: Publisher | None = None
        self._running = True
        self._flush_for = _LAST_FLUSH

    def run(self) -> None:
        """Read until the driver says that it is enough, or is gone."""
        self._watch(self._control.fileno(), self._hear_driver)
        self._watch(self._events, self._read_events)
        self._publish()
        while self._running:
            for fd, _ in self._poll.poll(self._look()):
                handler = self._handlers.get(fd)
                if handler is not None:  # else closed by a handler before it
                    handler()
            self._settle()

    def close(self) -> None:
        """Read what is left, show it, and let go of everything."""
        self._read_events(_ALL_EVENTS)
        for key in list(self._intakes):
            self._forget(key)
        self._settle()
        deadline = time.monotonic() + self._flush_for
        for sink in self._sinks.values():
            sink.flush_until(deadline)
            sink.close(deadline)
        if self._publisher is not None:
            self._publisher.send({"kind": "event", "event": "phalanx.stream_closed"})
            self._publisher.close()

    # --- what the driver says -------------------------------------------------------------

    def _hear_driver(self) -> None:
        try:
            data, fds = receive_with_fds(self._control, 1 << 16, 8, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._running = False
            return
        message = json.loads(data)
        match message["do"]:
            case "open":
                self._open(message["key"], message["labels"], fds)
            case "label":
                intake = self._intakes.get(message["key"])
                if intake is not None:
                    intake.labels = WorkerLabels.from_dict(message["labels"])
            case "drain":
                self._drain(message["key"])
                os.eventfd_write(fds[0], 1)
                os.close(fds[0])
            case "forget":
                self._forget(message["key"])
            case "close":
                self._flush_for = message["seconds"]
                self._running = False
            case unknown:
                raise AssertionError(unknown)

    def _open(self, key: int, labels: dict[str, Any], fds: list[int]) -> None:
        tail_fd, *lanes = fds
        if key in self._intakes:  # said again by a driver that could not know it had arrived
            for fd in fds:
                os.close(fd)
            return
        out, err, log = lanes
        intake = Intake(WorkerLabels.from_dict(labels), Tail(tail_fd), (out, err, log))
        self._intakes[key] = intake
        for fd in lanes:
            self._watch(fd, functools.partial(self._read, intake, fd))

    def _drain(self, key: int) -> None:
        self._read_events(_ALL_EVENTS)
        intake = self._intakes.get(key)
        if intake is not None:
            for fd in intake.drain(self._take):
                self._end(intake, fd)

    def _forget(self, key: int) -> None:
        self._drain(key)
        intake = self._intakes.pop(key, None)
        if intake is not None:
            for fd in list(intake.lanes):
                self._end(intake, fd)
            intake.close()

    # --- what is written ------------------------------------------------------------------

    def _read(self, intake: Intake, fd: int) -> None:
        if not intake.read(fd, self._take):
            self._end(intake, fd)

    def _end(self, intake: Intake, fd: int) -> None:
        self._unwatch(fd)
        intake.end(fd)

    def _read_events(self, limit: int = _EVENTS_AT_ONCE) -> None:
        records, _ = read_records(self._events, limit)
        for record in map(_loaded, records):
            if record.get("event") not in GLANCES:
                self._record("event", record)
            elif self._publisher is not None:
                self._publisher.send_state(record)

    def _take(self, intake: Intake, lane: Lane, lines: list[bytes]) -> None:
        labels = intake.labels
        if lane == "log":
            for line in lines:
                own = _shown(labels)
                try:
                    self._record("log", {**own, **_loaded(line)}, labels.prefix())
                except Exception:  # noqa: BLE001 -- one worker's record ends nobody's output
                    self._record("log", {**own, **_malformed(line)}, labels.prefix())
            return
        sink = self._out if lane == "stdout" else self._err
        if self._console == "text":
            sink.write(render_lines(labels.prefix(), lines), len(lines))
        heard = self._publisher is not None and self._publisher.is_heard
        if self._console != "json" and not heard:
            return
        head = {"kind": lane, "timestamp": timestamp(), **_shown(labels)}
        for line in lines:
            record = {**head, "text": text_of(line)}
            if self._console == "json":
                sink.write(render_json(record), 1)
            if self._publisher is not None:
                self._publisher.send(record)

    def _record(self, kind: str, record: dict[str, Any], prefix: str | None = None) -> None:
        """Show and publish one structured record."""
        if kind == "event":
            record.pop("at", None)  # on the driver's monotonic clock, which is of no use elsewhere
        if LEVELS.get(str(record.get("level", "info")), LEVELS["info"]) >= self._level:
            if self._console == "text":
                self._err.write(
                    render_record(prefix_of(record) if prefix is None else prefix, record), 1
                )
            elif self._console == "json":
                self._err.write(render_json({**record, "kind": kind}), 1)
        if self._publisher is not None:
            self._publisher.send({**record, "kind": kind})

    # --- where it goes --------------------------------------------------------------------

    def _publish(self) -> None:
        if self._listener is None:
            return
        try:
            from phalanx.runtime.observe.publisher import Publisher  # noqa: PLC0415 -- zmq, only where it is wanted

            self._publisher = Publisher(self._listener)
        except Exception as error:  # noqa: BLE001 -- without observers all else still works
            event = StreamUnavailable(problem=repr(error), at=time.monotonic())
            self._record("event", {"timestamp": timestamp(), **fields(event)})
        else:
            self._watch(self._publisher.fd, self._publisher.settle)

    def _look(self) -> float | None:
        """Ask the driver what it looks like, if somebody watches; return when to do so again."""
        if self._wish is None or self._publisher is None or not self._publisher.is_watched:
            return None
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wish, 1)
        return self._next_look - now

    def _settle(self) -> None:
        """After each round: write what there is room for, own up to what was dropped."""
        for where, sink in self._sinks.items():
            if sink.wants_to_write and sink.fd not in self._waiting:
                self._waiting.add(sink.fd)
                self._watch(sink.fd, sink.flush, select.EPOLLOUT)
            elif not sink.wants_to_write and sink.fd in self._waiting:
                self._waiting.discard(sink.fd)
                self._unwatch(sink.fd)
            # On a full disk the event would be lost as well, and counted, and told again.
            if sink.dropped and sink.is_empty and not self._err.is_full:
                event = LinesDropped(where=where, lines=sink.dropped, at=time.monotonic())
                sink.dropped = 0
                self._record("event", {"timestamp": timestamp(), **fields(event)})
        if self._publisher is not None:
            self._publisher.settle()

    def _watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        self._handlers.pop(fd, None)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)


def _loaded(data: bytes) -> dict[str, Any]:
    """Return a record, whatever somebody wrote into the channel."""
    try:
        record: object = json.loads(data)
    except (ValueError, RecursionError):
        record = None
    return cast("dict[str, Any]", record) if isinstance(record, dict) else _malformed(data)


def _malformed(data: bytes) -> dict[str, Any]:
    return {"event": "phalanx.malformed_record", "level": "warning", "text": repr(data[:256])}


def _shown(labels: WorkerLabels) -> dict[str, Any]:
    """Return the labels that stand on every line, without those that say nothing."""
    return {key: value for key, value in labels.as_dict().items() if value not in ("", None)}
