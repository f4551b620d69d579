"""The output collector: the process that reads what workers write, keeps, shows and publishes it.

- One loop waits for input only: a terminal or an observer that does not read blocks no worker.
- A worker's last output is in its tail before it is shown. Records of the driver come in the order
  in which they were sent.
- It ends when the driver closes it or has exited. The driver has duplicates of all its descriptors,
  and starts another if it dies (`collector`).
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
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, cast

from phalanx.runtime.event import fields
from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.observe.console_text import render, render_json, render_lines, text_of
from phalanx.runtime.observe.events import LinesDropped, StreamUnavailable, WorkerLabels
from phalanx.runtime.observe.log_channel import LEVELS, timestamp
from phalanx.runtime.observe.status import STATUS_EVENTS

from .reader import ALL_RECORDS, WorkerReader, read_records
from .writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime.observe.stream_publisher import Publisher

    from .tail_buffer import Lane

_EVENTS_AT_ONCE: Final = 256
_STATUS: Final = 1.0  # seconds between status snapshots
_LAST_FLUSH: Final = 1.0  # seconds for a terminal that does not read, once the driver is gone


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Run; *payload* and *fds* are what `OutputCollector` hands over. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the last output of the others comes after these
    descriptor_limit.raise_limit()  # it holds six for each worker
    collector = _Collector(json.loads(payload), dict(fds))
    try:
        collector.run()
    finally:
        collector.close()
    return 0


class _Collector:
    def __init__(self, options: dict[str, Any], fds: dict[str, int]) -> None:
        self._console: str | None = options["console"]
        self._level = LEVELS[options["level"]]
        self._listener = fds.get("stream")
        self._control = socket.socket(fileno=fds["control"])
        self._events = fds["events"]
        self._status_request = fds.get("status_request")
        self._next_status = 0.0
        # Two writers to one pipe (2>&1) would cut each other's long lines in two.
        shared = os.path.samestat(os.fstat(fds["out"]), os.fstat(fds["err"]))
        self._idle = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        tell = functools.partial(os.eventfd_write, self._idle, 1)
        self._out = Writer(fds["out"], on_idle=tell)
        self._err = self._out if shared else Writer(fds["err"], on_idle=tell)
        self._writers = (
            {"stdout": self._out} if shared else {"stdout": self._out, "stderr": self._err}
        )
        self._readers: dict[int, WorkerReader] = {}  # by the driver's key for the worker
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._publisher: Publisher | None = None
        self._running = True
        self._flush_for = _LAST_FLUSH

    def run(self) -> None:
        """Read until the driver closes this process, or has exited."""
        self._watch(self._control.fileno(), self._hear_driver)
        self._watch(self._events, self._read_events)
        self._watch(self._idle, functools.partial(os.eventfd_read, self._idle))
        self._publish()
        while self._running:
            for fd, _ in self._poll.poll(self._request_status()):
                handler = self._handlers.get(fd)
                if handler is not None:  # else closed by a handler before it
                    handler()
            self._settle()

    def close(self) -> None:
        """Read what is left, show it, and let go of everything."""
        self._read_events(ALL_RECORDS)
        for key in list(self._readers):
            self._forget(key)
        self._settle()
        deadline = time.monotonic() + self._flush_for
        for writer in self._writers.values():
            writer.close(deadline)
        if self._publisher is not None:
            self._publisher.send({"kind": "event", "event": "phalanx.stream_closed"})
            self._publisher.close()

    # --- the driver's messages ------------------------------------------------------------

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
                if reader := self._readers.get(message["key"]):
                    reader.labels = WorkerLabels(**message["labels"])
            case "drain":
                self._read_events(ALL_RECORDS)
                if reader := self._readers.get(message["key"]):
                    reader.drain()
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
        if key in self._readers:  # sent again by a driver that could not know it had arrived
            for fd in fds:
                os.close(fd)
            return
        reader = WorkerReader(WorkerLabels(**labels), fds, self._take, self._unwatch)
        self._readers[key] = reader
        for fd in reader.lanes:
            self._watch(fd, functools.partial(reader.read, fd))

    def _forget(self, key: int) -> None:
        self._read_events(ALL_RECORDS)
        if reader := self._readers.pop(key, None):
            reader.close()

    # --- output and records ---------------------------------------------------------------

    def _read_events(self, limit: int = _EVENTS_AT_ONCE) -> None:
        records, _ = read_records(self._events, limit)
        for record in map(_loaded, records):
            if record.get("event") not in STATUS_EVENTS:
                self._record("event", record)
            elif self._publisher is not None:
                self._publisher.send_state(record)

    def _take(self, reader: WorkerReader, lane: Lane, lines: list[bytes]) -> None:
        labels = reader.labels
        if lane == "log":
            for line in lines:
                own = _shown(labels)
                try:
                    self._record("log", {**own, **_loaded(line)}, labels.prefix())
                except Exception:  # noqa: BLE001 -- one worker's record must not end the output of others
                    self._record("log", {**own, **_malformed(line)}, labels.prefix())
            return
        writer = self._out if lane == "stdout" else self._err
        if self._console == "text":
            writer.write(render_lines(labels.prefix(), lines), len(lines))
        heard = self._publisher is not None and self._publisher.is_heard
        if self._console != "json" and not heard:
            return
        head = {"kind": lane, "timestamp": timestamp(), **_shown(labels)}
        for line in lines:
            record = {**head, "text": text_of(line)}
            if self._console == "json":
                writer.write(render_json(record), 1)
            if self._publisher is not None:
                self._publisher.send(record)

    def _record(self, kind: str, record: dict[str, Any], prefix: str | None = None) -> None:
        """Show and publish one structured record."""
        record = {**record, "kind": kind}
        if self._publisher is not None:
            self._publisher.send(record)
        if kind == "event":
            record.pop("at", None)  # on the monotonic clock of this machine, of no use in a log
        if LEVELS.get(str(record.get("level", "info")), LEVELS["info"]) >= self._level:
            if self._console == "text":
                self._err.write(render(record, prefix), 1)
            elif self._console == "json":
                self._err.write(render_json(record), 1)

    # --- where it goes --------------------------------------------------------------------

    def _publish(self) -> None:
        if self._listener is None:
            return
        try:
            from phalanx.runtime.observe.stream_publisher import Publisher  # noqa: PLC0415 -- zmq, only where it is wanted

            self._publisher = Publisher(self._listener)
        except Exception as error:  # noqa: BLE001 -- without observers all else still works
            event = StreamUnavailable(problem=repr(error), at=time.monotonic())
            self._record("event", {"timestamp": timestamp(), **fields(event)})
        else:
            self._watch(self._publisher.fd, self._publisher.settle)

    def _request_status(self) -> float | None:
        """Request a status snapshot if an observer wants them; return seconds until the next."""
        request = self._status_request
        if request is None or self._publisher is None or not self._publisher.is_watched:
            return None
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + _STATUS
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(request, 1)
        return self._next_status - now

    def _settle(self) -> None:
        """After each round: report lines that were dropped."""
        # On a full disk the event would be lost, counted and reported again.
        for where, writer in self._writers.items():
            if not self._err.is_full and (lines := writer.take_dropped()):
                event = LinesDropped(where=where, lines=lines, at=time.monotonic())
                self._record("event", {"timestamp": timestamp(), **fields(event)})
        if self._publisher is not None:
            self._publisher.settle()

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        self._handlers.pop(fd, None)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)


def _loaded(data: bytes) -> dict[str, Any]:
    """Return a record, whatever was written into the channel."""
    try:
        record: object = json.loads(data)
    except (ValueError, RecursionError):
        record = None
    return cast("dict[str, Any]", record) if isinstance(record, dict) else _malformed(data)


def _malformed(data: bytes) -> dict[str, Any]:
    return {"event": "phalanx.malformed_record", "level": "warning", "text": repr(data[:256])}


def _shown(labels: WorkerLabels) -> dict[str, Any]:
    """Return the labels that stand on every line, without those that say nothing."""
    return {key: value for key, value in asdict(labels).items() if value not in ("", None)}
