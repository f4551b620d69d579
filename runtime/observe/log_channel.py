"""Structured logging without touching anybody's configuration.

Guarantees: a record travels as one message on a SEQPACKET socket, so records are never torn or
mixed; logging never raises into the code that logs, and never blocks for longer than *patience*:
past it records are dropped, counted, and the count is logged as soon as there is room. The user's
structlog and stdlib logging, in driver and workers, stay as they were; `LoggingBridge` is for who
asks for it.

Left to others: who reads the socket (the scribe), and what is shown.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from phalanx.runtime.event import LoggedEvent, fields

from .events import LinesDropped

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from structlog.typing import FilteringBoundLogger

    from .labels import WorkerLabels

LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
MAX_RECORD: Final = 65536  # bytes; well under the kernel's default limit for one message
_MAX_VALUE: Final = 4096  # characters that are left of a value in a record past MAX_RECORD


class LogChannel:
    """The writing end of a log socket. Thread-safe.

    Attributes:
        where: What the count of dropped records is filed under.
        patience: Seconds one record may wait for room. Only the first record that finds none
            waits: until one goes through again, the others are dropped at once.
    """

    def __init__(self, fd: int, *, where: str, patience: float = 0.2) -> None:
        """Take over *fd*."""
        self.where = where
        self.patience = patience
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._dropped = 0

    def send(self, record: bytes) -> bool:
        """Send one record, or count it as dropped; return which."""
        if self._dropped and not self._send_count():
            return self._drop()
        return self._send(record) or (
            not self._dropped and self._wait_writable() and self._send(record)
        ) or self._drop()  # fmt: skip

    def emit(self, event: LoggedEvent, **labels: object) -> bool:
        """Send *event* as a record."""
        return self.send(encode_record({"timestamp": timestamp(), **labels, **fields(event)}))

    def close(self) -> None:
        """Close the descriptor; what is logged after that is dropped."""
        self._socket.close()

    def _send(self, record: bytes) -> bool:
        try:
            self._socket.send(record, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # full, or every reader is gone, or the user closed our descriptor
            return False
        return True

    def _send_count(self) -> bool:
        with self._lock:
            event = LinesDropped(where=self.where, lines=self._dropped, at=time.monotonic())
            record = encode_record({"timestamp": timestamp(), "pid": os.getpid(), **fields(event)})
            if self._send(record):
                self._dropped = 0
            return not self._dropped

    def _drop(self) -> bool:
        with self._lock:
            self._dropped += 1
        return False

    def _wait_writable(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLOUT)
            return bool(poll.poll(self.patience * 1000))
        except (OSError, ValueError):  # closed under us
            return False


def worker_logger(fd: int, labels: WorkerLabels, *, level: str = "info") -> FilteringBoundLogger:
    """Return a logger onto the log channel *fd*, which belongs to it from now on.

    Every record carries the worker's labels, and the pid of the process it comes from.
    """
    bound = {"group": labels.group, "rank": labels.rank, "incarnation": labels.incarnation}
    channel = LogChannel(fd, where="worker")
    return _logger(channel, level).bind(**bound, epoch=labels.epoch)


def driver_logger(channel: LogChannel, *, level: str = "info", **bound: object) -> Any:
    """Return a logger for the driver's own records, with *bound* on each of them."""
    return _logger(channel, level).bind(**bound)


class LoggingBridge(logging.Handler):
    """Sends what a program logs through the standard library to a structlog logger."""

    def __init__(self, logger: FilteringBoundLogger, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on; the standard library's name for this."""
        try:
            text = record.getMessage()
            self._logger.log(
                record.levelno, text, logger=record.name, exc_info=record.exc_info or None
            )
        except Exception:  # noqa: BLE001 -- as logging itself does: a bad record harms nobody
            self.handleError(record)


def timestamp() -> str:
    """Return the wall clock as every record carries it: ISO 8601, UTC, microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def encode_record(record: Mapping[str, object]) -> bytes:
    """Return *record* as JSON of at most `MAX_RECORD` bytes, whatever its values are.

    Values JSON cannot hold are shown by their ``repr``. A record past the limit has its long
    values cut and says so in ``truncated``, the length it had.
    """
    try:
        data = json.dumps(record, default=_shown).encode()
    except (ValueError, TypeError, RecursionError):  # circular, or keys that are no strings
        record = {str(key): _flat(value) for key, value in record.items()}
        data = json.dumps(record).encode()
    if len(data) <= MAX_RECORD:
        return data
    short = {key: _cut(value) for key, value in list(record.items())[:64]}
    cut = json.dumps({**short, "truncated": len(data)}, default=_shown).encode()
    if len(cut) <= MAX_RECORD:
        return cut
    named = {key: _cut(record[key])[:256] for key in ("event", "level") if key in record}
    return json.dumps({**named, "truncated": len(data)}).encode()


def _cut(value: object) -> Any:
    flat = _flat(value)
    return flat[:_MAX_VALUE] if isinstance(flat, str) else flat


def _flat(value: object) -> Any:
    return value if isinstance(value, (str, int, float, type(None))) else _shown(value)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 -- any class of the user's may come by, and logging goes on
        return f"<{type(value).__qualname__} whose repr fails>"


class _ChannelLogger:
    """What structlog calls once a record is rendered."""

    def __init__(self, channel: LogChannel) -> None:
        self._channel = channel

    def msg(self, record: bytes) -> None:
        self._channel.send(record)

    log = debug = info = warning = warn = error = err = exception = critical = fatal = msg


def _logger(channel: LogChannel, level: str) -> FilteringBoundLogger:
    import structlog  # noqa: PLC0415 -- half of it is for terminals; importing it takes 0.1 s
    from structlog.processors import ExceptionRenderer  # noqa: PLC0415 -- as above
    from structlog.tracebacks import ExceptionDictTransformer  # noqa: PLC0415 -- as above

    # Locals stay out of tracebacks: they hold tensors, prompts and keys.
    exceptions = ExceptionRenderer(ExceptionDictTransformer(show_locals=False))

    def label(_: Any, name: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        record["pid"] = os.getpid()  # not bound once: a forked child logs under its own
        record["level"] = {"warn": "warning", "exception": "error"}.get(name, name)
        record["timestamp"] = timestamp()
        return record

    def render(_: Any, __: str, record: MutableMapping[str, Any]) -> bytes:
        return encode_record(record)

    logger: FilteringBoundLogger = structlog.wrap_logger(
        _ChannelLogger(channel),
        processors=[structlog.contextvars.merge_contextvars, label, exceptions, render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger
