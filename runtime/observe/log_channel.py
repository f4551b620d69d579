"""Log channel: structlog records on a SEQPACKET socket.

- A record is one packet: never torn or mixed.
- Logging never raises into the code that logs. It blocks for at most *room_timeout*; then records
  are dropped and counted, and the count is logged once there is room.
- The program's own structlog and stdlib configuration stays as it is.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import time
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from phalanx.runtime.event import LoggedEvent, fields
from phalanx.runtime.threads.reentrant_lock import AskableLock

from .events import LinesDropped, WorkerLabels

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from structlog.typing import FilteringBoundLogger


LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
MAX_RECORD: Final = 65536  # bytes; well below the kernel's default limit of a packet
_CUTS: Final = (4096, 256, 32)  # lengths in a record past MAX_RECORD: the first by which it fits
_DEEPEST: Final = 8  # levels of such a record; what is below them is a text
_LONGEST_INT: Final = 1024  # bits; Python refuses to print one of thousands of digits


class LogChannel:
    """The writing end of a log socket. Thread-safe.

    Attributes:
        where: The name of this channel in `LinesDropped`.
        room_timeout: Seconds that a record may wait for room. Only the first one that finds none
            waits: until one is sent again, the others are dropped at once.
    """

    def __init__(self, fd: int, *, where: str, room_timeout: float = 0.2) -> None:
        """Take over *fd*."""
        self.where = where
        self.room_timeout = room_timeout
        self._socket = socket.socket(fileno=fd)
        self._lock = AskableLock()
        self._dropped = 0

    def send(self, record: bytes) -> bool:
        """Send one record; return False if it was dropped and counted."""
        if self._dropped and not self._send_count():
            return self._drop()
        return self._send(record) or (
            not self._dropped and self._wait_writable() and self._send(record)
        ) or self._drop()  # fmt: skip

    def emit(self, event: LoggedEvent) -> bool:
        """Send *event* as a record."""
        return self.send(encode_record({"timestamp": timestamp(), **fields(event)}))

    def close(self) -> None:
        """Close the descriptor; later records are dropped."""
        self._socket.close()

    def _send(self, record: bytes) -> bool:
        try:
            self._socket.send(record, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # full, without a reader, or closed by the user
            return False
        return True

    def _send_count(self) -> bool:
        # A finalizer or signal handler has interrupted this; or another thread is at it, which in
        # a forked process there may not be.
        if self._lock.is_mine() or not self._lock.acquire(blocking=False):
            return False
        try:
            event = LinesDropped(where=self.where, lines=self._dropped, at=time.monotonic())
            record = encode_record({"timestamp": timestamp(), "pid": os.getpid(), **fields(event)})
            if self._send(record):
                self._dropped = 0
            return not self._dropped
        finally:
            self._lock.release()

    def _drop(self) -> bool:
        if self._lock.acquire(blocking=False):  # else one is not counted
            self._dropped += 1
            self._lock.release()
        return False

    def _wait_writable(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLOUT)
            return bool(poll.poll(self.room_timeout * 1000))
        except (OSError, ValueError):  # closed meanwhile
            return False


def worker_logger(fd: int, labels: WorkerLabels) -> FilteringBoundLogger:
    """Return a logger to the log channel *fd*, which it owns.

    Every record carries the worker's labels, and the pid of the process that logs.
    """
    bound = {"group": labels.group, "rank": labels.rank, "incarnation": labels.incarnation}
    logger = channel_logger(LogChannel(fd, where="worker"))
    own: FilteringBoundLogger = logger.bind(**bound, epoch=labels.epoch)
    return own


def timestamp() -> str:
    """Return the wall clock in ISO 8601, UTC, with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def encode_record(record: Mapping[str, object]) -> bytes:
    """Return *record* as JSON of at most `MAX_RECORD` bytes.

    Values that JSON cannot hold are replaced by their ``repr``. In a record past the limit long
    texts and lists are cut, wherever they stand, and ``truncated`` has its length.
    """
    try:
        data = json.dumps(record, default=_shown).encode()
    except (ValueError, TypeError, RecursionError):  # circular, or keys that are no strings
        record = {str(key): _flat(value) for key, value in record.items()}
        data = json.dumps(record).encode()
    if len(data) <= MAX_RECORD:
        return data
    for most in _CUTS:
        short = {key: _cut(value, most) for key, value in list(record.items())[:64]}
        cut = json.dumps({**short, "truncated": len(data)}).encode()
        if len(cut) <= MAX_RECORD:
            return cut
    named = {key: str(_cut(record[key], 256))[:256] for key in ("event", "level") if key in record}
    return json.dumps({**named, "truncated": len(data)}).encode()


def _cut(value: object, most: int, deepest: int = _DEEPEST) -> Any:
    """Return *value* with no text, list or mapping in it that is longer than *most*."""
    if deepest and isinstance(value, dict):
        items = islice(cast("dict[object, object]", value).items(), most)
        return {str(key)[:most]: _cut(each, most, deepest - 1) for key, each in items}
    if deepest and isinstance(value, list | tuple):
        first = islice(cast("list[object]", value), most)
        return [_cut(each, most, deepest - 1) for each in first]
    flat = _flat(value)
    return flat[:most] if isinstance(flat, str) else flat


def _flat(value: object) -> Any:
    if isinstance(value, int) and value.bit_length() > _LONGEST_INT:
        return _shown(value)
    return value if isinstance(value, (str, int, float, type(None))) else _shown(value)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 -- a class of the user's
        return f"<{type(value).__qualname__} whose repr fails>"


class _ChannelLogger:
    """The logger that structlog calls with a rendered record."""

    def __init__(self, channel: LogChannel) -> None:
        self._channel = channel

    def msg(self, record: bytes) -> None:
        self._channel.send(record)

    log = debug = info = warning = warn = error = err = exception = critical = fatal = msg


def channel_logger(channel: LogChannel, *, level: str = "info") -> FilteringBoundLogger:
    """Return a logger to *channel*, apart from the program's own configuration."""
    import structlog  # noqa: PLC0415 -- importing it takes 0.1 s
    from structlog.processors import ExceptionRenderer  # noqa: PLC0415 -- as above
    from structlog.tracebacks import ExceptionDictTransformer  # noqa: PLC0415 -- as above

    # No locals in tracebacks: they hold tensors, prompts and keys.
    exceptions = ExceptionRenderer(ExceptionDictTransformer(show_locals=False))

    def label(_: Any, name: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        record["pid"] = os.getpid()  # a forked child has another
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
