"""How lines, records and events look on the driver's own terminal or log file.

Guarantees: pure; whatever a worker writes, logs or names, what is shown is UTF-8 without control
characters other than tab and the end of each line: no escape sequence reaches a terminal, colours
included; one worker's line per line.

Left to others: where it is written (`sink.py`) and what is shown at all (the scribe).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, cast

from .crash_report import CrashReport
from .labels import WorkerLabels

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTROL: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")
_NEEDS_CARE: Final = re.compile(b"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_DRIVER: Final = "[driver]"
# The prefix says them, or is what they would say at more length.
_LABELS: Final = ["child", "group", "rank", "coordinates", "incarnation", "epoch", "pid", "device"]
# Shown in a place of its own, or, as the monotonic clock, for programs only.
_ELSEWHERE: Final = ("kind", "seq", "timestamp", "level", "event", "exception", "report", "at")


def text_of(line: bytes) -> str:
    """Return *line* as text that is safe to show.

    Of a line that was overwritten with carriage returns (a progress bar) the last state is left.
    """
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = line.decode("utf-8", "backslashreplace")
    return safe_text(text)


def render_lines(prefix: str, lines: Sequence[bytes]) -> bytes:
    """Return *lines* of a worker with *prefix* before each."""
    head = f"{safe_text(prefix)} ".encode()
    whole = b"\n".join(lines)
    if not _NEEDS_CARE.search(whole):  # nearly always; at a flood it is ten times quicker
        try:
            whole.decode()
        except UnicodeDecodeError:
            pass
        else:
            return head + whole.replace(b"\n", b"\n" + head) + b"\n"
    return b"".join(head + text_of(line).encode() + b"\n" for line in lines)


def render_record(prefix: str, record: dict[str, Any]) -> bytes:
    """Return a log record or event as one line for people; tracebacks and reports lie below it."""
    clock = str(record.get("timestamp", ""))[11:23]
    hidden = _ELSEWHERE if prefix == _DRIVER else (*_ELSEWHERE, *_LABELS)
    shown = " ".join(
        f"{key}={_value(value)}"
        for key, value in record.items()
        if key not in hidden and value is not None and value != ""
    )
    level, event = record.get("level", "info"), record.get("event", "")
    line = f"{clock} {level!s:<8} {prefix} {event} {shown}".rstrip()
    below = _traceback(record.get("exception")) + _report(record.get("report"))
    rest = [f"{prefix}   {text}" for text in below]
    return "".join(f"{safe_text(text)}\n" for text in (line, *rest)).encode()


def render(record: dict[str, Any]) -> bytes:
    """Return a message of the stream as the console of its driver shows it."""
    prefix = prefix_of(record)
    if record.get("kind") in ("stdout", "stderr"):
        return f"{safe_text(prefix + ' ' + str(record.get('text', '')))}\n".encode()
    return render_record(prefix, record)


def render_event(console: str, record: dict[str, Any]) -> bytes:
    """Return a record of the driver's own as *console* (``text`` or ``json``) shows it."""
    if console == "text":
        return render_record(prefix_of(record), record)
    return render_json({**record, "kind": "event"})


def prefix_of(record: dict[str, Any]) -> str:
    """Return who a record is about: a worker, or the driver itself."""
    told: Any = record.get("report", record)
    if not isinstance(told, dict):
        return _DRIVER
    about = cast("dict[str, Any]", told)
    if "group" not in about or "incarnation" not in about:
        return _DRIVER
    names = ("group", "rank", "incarnation", "coordinates", "pid")
    known = {name: about[name] for name in names if about.get(name) is not None}
    return WorkerLabels(child="", **known).prefix()


def render_json(record: dict[str, Any]) -> bytes:
    """Return *record* as one line of JSON."""
    return json.dumps(record).encode() + b"\n"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value if value.isprintable() and " " not in value else repr(value)
    return json.dumps(value)


def safe_text(text: str) -> str:
    """Return *text* as one line that is safe to show: control characters but tabs are escaped.

    Half characters, which no encoding has (Python makes them of bytes that are no text), are
    escaped too. Everything from a worker or a user that is shown goes through here.
    """
    return text if text.isprintable() else _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    found = match[0]
    return f"\\x{ord(found):02x}" if found < "\u0100" else f"\\u{ord(found):04x}"


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
