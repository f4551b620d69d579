"""Console renderer: lines, records and events as text for a terminal or log file.

- Pure. A line of a worker is one line.
- The output is UTF-8 without control characters other than tab and line end, for any worker
  output: no escape sequence reaches a terminal, colours included.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any, Final, cast

from .crash_report import CrashReport
from .events import WorkerLabels
from .safe_text import safe_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEEDS_CARE: Final = re.compile(  # what `safe_text` escapes, in UTF-8
    b"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
)
_DRIVER: Final = "[driver]"
_LINES: Final = ("stdout", "stderr")
# Shown by the prefix.
_LABELS: Final = ["child", "group", "rank", "coordinates", "incarnation", "epoch", "pid", "device"]
# Shown in another place, or not at all.
_ELSEWHERE: Final = ("kind", "seq", "timestamp", "level", "event", "exception", "report", "at")


def text_of(line: bytes) -> str:
    """Return *line* as safe text; of one with carriage returns (a progress bar) the last state."""
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return safe_text(line.decode("utf-8", "backslashreplace"))


def render_lines(prefix: str, lines: Sequence[bytes]) -> bytes:
    """Return *lines* of a worker with *prefix* before each."""
    head = f"{safe_text(prefix)} ".encode()
    whole = b"\n".join(lines)
    if not _NEEDS_CARE.search(whole):  # nearly always, and ten times faster
        with contextlib.suppress(UnicodeDecodeError):
            whole.decode()
            return head + whole.replace(b"\n", b"\n" + head) + b"\n"
    return b"".join(head + text_of(line).encode() + b"\n" for line in lines)


def describe(record: dict[str, Any], prefix: str | None = None) -> list[str]:
    """Return a message of the stream as lines without time and level, tracebacks and reports last.

    Args:
        prefix: Before each line; None takes that of the worker that the message is about.
    """
    prefix = prefix_of(record) if prefix is None else prefix
    if record.get("kind") in _LINES:
        return [safe_text(f"{prefix} {record.get('text', '')}")]
    hidden = _ELSEWHERE if prefix == _DRIVER else (*_ELSEWHERE, *_LABELS)
    shown = " ".join(
        f"{key}={_value(value)}"
        for key, value in record.items()
        if key not in hidden and value is not None and value != ""
    )
    line = f"{prefix} {record.get('event', '')} {shown}".rstrip()
    below = _traceback(record.get("exception")) + _report(record.get("report"))
    return [safe_text(text) for text in (line, *(f"{prefix}   {text}" for text in below))]


def render(record: dict[str, Any], prefix: str | None = None) -> bytes:
    """Return a message of the stream as on its driver's console; see `describe`."""
    line, *below = describe(record, prefix)
    if record.get("kind") not in _LINES:
        clock, level = str(record.get("timestamp", ""))[11:23], record.get("level", "info")
        line = safe_text(f"{clock} {level!s:<8} {line}")
    return "".join(f"{text}\n" for text in (line, *below)).encode()


def prefix_of(record: dict[str, Any]) -> str:
    """Return the prefix of the worker that a record is about, or that of the driver."""
    about: Any = record if record.get("kind") == "log" else record.get("report", record)
    if not isinstance(about, dict) or "group" not in about or "incarnation" not in about:
        return _DRIVER
    known = cast("dict[str, Any]", about)
    names = ("group", "rank", "incarnation", "coordinates", "pid")
    labels = {name: known[name] for name in names if known.get(name) is not None}
    return WorkerLabels(child="", **labels).prefix()


def render_json(record: dict[str, Any]) -> bytes:
    """Return *record* as one line of JSON."""
    return json.dumps(record).encode() + b"\n"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value if value.isprintable() and " " not in value else repr(value)
    return json.dumps(value)


def _report(report: Any) -> list[str]:
    """Return the lines of a crash report in a record."""
    if not isinstance(report, dict):
        return [_value(report)] if report else []
    try:
        return CrashReport.from_json(json.dumps(report)).render().splitlines()
    except ValueError:  # a user's own field of that name
        return [_value(report)]


def _traceback(exceptions: Any) -> list[str]:
    """Return the lines of a traceback as structlog's ``ExceptionDictTransformer`` makes it."""
    if not isinstance(exceptions, list):
        return str(exceptions).splitlines() if exceptions else []
    lines: list[str] = []
    try:
        for raised in cast("list[dict[str, Any]]", exceptions):
            lines += [
                f"{frame.get('filename')}:{frame.get('lineno')} in {frame.get('name')}"
                for frame in raised.get("frames", ())
            ]
            lines += f"{raised.get('exc_type')}: {raised.get('exc_value')}".splitlines()
    except (AttributeError, TypeError):  # a user's own field of that name
        return [_value(exceptions)]
    return lines
