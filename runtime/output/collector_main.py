"""The output collector: the process that reads, keeps, shows and publishes the output of workers.

- One loop waits for input only: a terminal or an observer that does not read blocks no worker.
- A worker's last output is in its tail before it is shown. Records of the driver come in the order
  in which they were sent.
- Each descriptor of the driver is written on a separate thread; its flags, which other processes
  share, are not changed.
- It ends when the driver closes it or has exited. The driver has duplicates of all its descriptors,
  and starts another if it dies (`collector_client`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import queue
import select
import selectors
import signal
import socket
import stat
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, cast

from phalanx.runtime.event import fields
from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.observe.console_text import render, render_json, render_lines, text_of
from phalanx.runtime.observe.event_stream import Publisher
from phalanx.runtime.observe.events import LinesDropped, StreamUnavailable, WorkerLabels
from phalanx.runtime.observe.log_channel import LEVELS, timestamp
from phalanx.runtime.observe.status import EARLIER_REPORT, STATUS_EVENTS

from .reader import ALL_RECORDS, WorkerReader, read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .tail_buffer import Lane

_EVENTS_AT_ONCE: Final = 256
_STATUS: Final = 1.0  # seconds between status snapshots
_REPORTS: Final = 10  # the latest crash reports, for observers that come later
_LAST_FLUSH: Final = 1.0  # seconds for a terminal that does not read, once the driver is gone
_LIMIT: Final = 16 << 20  # bytes held for a reader that pauses; arbitrary, a big flood fits
_STEP: Final = 1 << 16  # bytes written at once


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


class Writer:
    """One output descriptor of the driver.

    `write` never blocks, whatever it is (a terminal held by Ctrl-S, a pipe that is not read).
    Memory is bounded: a block that does not fit is dropped whole, and its lines are counted.

    Args:
        fd: Written and, at the end, closed.
        limit: Bytes that are held.
        on_idle: Called on the thread whenever nothing is held.

    Attributes:
        is_full: Whether the disk had no room at the last attempt.
    """

    def __init__(
        self, fd: int, *, limit: int = _LIMIT, on_idle: Callable[[], object] = bool
    ) -> None:
        self.is_full = False
        self._fd = fd
        self._limit = limit
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._blocks: queue.SimpleQueue[tuple[bytes, int] | None] = queue.SimpleQueue()
        self._held = 0  # bytes, those that are being written included
        self._dropped = 0
        self._is_broken = False
        # A write to a pipe of at most PIPE_BUF is whole or not at all: our lines and those of other
        # writers to the same pipe do not cut each other in two.
        self._step = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(fd).st_mode) else _STEP
        self._thread = threading.Thread(target=self._run, name="phalanx-writer", daemon=True)
        self._thread.start()

    def write(self, block: bytes, lines: int) -> None:
        """Have *block* written, which holds *lines* whole lines."""
        with self._lock:
            if self._is_broken:
                return
            if self._held and self._held + len(block) > self._limit:
                self._dropped += lines
                return
            self._blocks.put((block, lines))
            self._held += len(block)

    def take_dropped(self) -> int:
        """Return how many lines have been dropped since the last time; 0 while any are held."""
        with self._lock:
            if self._held:
                return 0
            dropped, self._dropped = self._dropped, 0
            return dropped

    def close(self, deadline: float) -> None:
        """Write what is held until *deadline* (monotonic); the rest is lost."""
        self._blocks.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (held := self._blocks.get()) is not None:
            block, lines = held
            try:
                if not self._is_broken:
                    self._write_all(block)
                    self.is_full = False
            except OSError as error:
                # Only a full disk can get better.
                self.is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                self._is_broken = not self.is_full
                with self._lock:
                    self._dropped += lines if self.is_full else 0
            with self._lock:
                self._held -= len(block)
                is_idle = not self._held
            if is_idle:
                self._on_idle()
        os.close(self._fd)

    def _write_all(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            end = len(data)
            if end - at > self._step:  # whole lines, or a piece of one that is longer than a step
                end = data.rfind(b"\n", at, at + self._step) + 1 or at + self._step
            try:
                at += os.write(self._fd, memoryview(data)[at:end])
            except BlockingIOError:  # another process that shares it has set O_NONBLOCK
                room = select.poll()
                room.register(self._fd, select.POLLOUT)
                room.poll()


class _Collector:
    def __init__(self, options: dict[str, Any], fds: dict[str, int]) -> None:
        self._console: str | None = options["console"]
        self._level = LEVELS[options["level"]]
        self._listener = fds.get("stream")
        self._control = socket.socket(fileno=fds["control"])
        self._events = fds["events"]
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
        self._selector = selectors.DefaultSelector()
        self._publisher: Publisher | None = None
        self._reports: deque[dict[str, Any]] = deque(maxlen=_REPORTS)
        self._running = True
        self._flush_for = _LAST_FLUSH

    def run(self) -> None:
        """Read until the driver closes this process, or has exited."""
        self._watch(self._control.fileno(), self._on_driver_message)
        self._watch(self._events, self._read_events)
        self._watch(self._idle, functools.partial(os.eventfd_read, self._idle))
        self._publish()
        while self._running:
            for key, _ in self._selector.select(self._request_status()):
                # As it is now: a handler before it may have closed it, and opened another.
                if current := self._selector.get_map().get(key.fd):
                    current.data()
            self._settle()

    def close(self) -> None:
        """Read and show the remaining output, and close all descriptors."""
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

    def _on_driver_message(self) -> None:
        try:
            data, fds = receive_with_fds(self._control, 1 << 16, 8, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
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
            case _:  # "close"
                self._flush_for = message["seconds"]
                self._running = False

    def _open(self, key: int, labels: dict[str, Any], fds: list[int]) -> None:
        if key in self._readers:  # sent again by a driver that could not know it had arrived
            for fd in fds:
                os.close(fd)
            return
        reader = WorkerReader(WorkerLabels(**labels), fds, self._take, self._selector.unregister)
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
                self._publisher.send({**record, "kind": "state"})

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
        has_subscribers = self._publisher is not None and self._publisher.has_subscribers
        if self._console != "json" and not has_subscribers:
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
            if "report" in record:
                self._reports.append({**record, "event": EARLIER_REPORT, "kind": "state"})
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
            self._publisher = Publisher(self._listener)
        except Exception as error:  # noqa: BLE001 -- without observers all else still works
            event = StreamUnavailable(problem=repr(error), at=time.monotonic())
            self._record("event", {"timestamp": timestamp(), **fields(event)})
        else:
            self._watch(self._publisher.fd, self._greet)

    def _request_status(self) -> float | None:
        """Request a status snapshot if an observer wants them; return seconds until the next."""
        if self._publisher is None or not self._publisher.is_watched:
            return None
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + _STATUS
            with contextlib.suppress(OSError):  # the driver reads nothing, or has gone
                self._control.send(b"status", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        return self._next_status - now

    def _settle(self) -> None:
        """After each round: report lines that were dropped."""
        # On a full disk the event would be lost, counted and reported again.
        for where, writer in self._writers.items():
            if not self._err.is_full and (lines := writer.take_dropped()):
                event = LinesDropped(where=where, lines=lines, at=time.monotonic())
                self._record("event", {"timestamp": timestamp(), **fields(event)})
        self._greet()

    def _greet(self) -> None:
        """Read what observers ask for; one that wants status snapshots gets the latest reports."""
        while self._publisher is not None and self._publisher.settle():
            for report in self._reports:
                self._publisher.send(report)

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, handler)


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
