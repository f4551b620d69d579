"""The failures of the last round, in torchrun's words."""

from __future__ import annotations

import datetime as dt
import json
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phalanx.runtime import safe_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.runtime import WorkerExited

    from .logs import LogPlan

_WIDEST = 60
_NONE = "<N/A>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The end of one rank that failed, or that was stopped because another had.

    Attributes:
        code: The exit code; below 0 the signal that ended it.
        error_file: Where its error lies; ``<N/A>`` if there is none.
        record: Its content; None for none.
        message: The traceback, or what is known instead.
        at: Seconds since the epoch.
    """

    rank: int
    pid: int | None
    code: int
    error_file: str
    record: dict[str, Any] | None
    message: str
    at: float

    @classmethod
    def of(cls, exited: WorkerExited, logs: LogPlan, restarts: int = 0) -> Failure | None:
        """Return the failure that *exited* reports; None if that is none.

        *restarts* is how many there were before the group's first epoch.
        """
        reason = exited.reason
        code = -reason.signal if reason.signal is not None else reason.code
        if not code or exited.rank is None:
            return None
        error_file = logs.error_file(exited.rank, exited.epoch - 1 + restarts)
        at = time.time() - (time.monotonic() - exited.at)
        record = _read(error_file)
        if logs.folder is None and Path(error_file).stat().st_mtime < at - exited.ran_for:
            record = None  # of a round before: the rank has ended before it ran the program
        message = ""
        if record is not None:
            message, at = _message_of(record, at)
        if not message and reason.kind == "unresponsive":
            message = f"{reason.detail}: ended by phalanx"
        elif not message and code < 0:
            message = f"Signal {-code} ({_name(code)}) received by PID {exited.pid}"
        elif not message:
            message = "no traceback: the program ended by itself (sys.exit, os._exit)"
        return cls(
            rank=exited.rank,
            pid=exited.pid,
            code=code,
            error_file=_NONE if record is None or logs.folder is None else error_file,
            record=record,
            message=message,
            at=at,
        )

    def text(self, index: int) -> str:
        """Return its part of the summary."""
        time_ = dt.datetime.fromtimestamp(int(self.at)).isoformat(sep="_")  # noqa: DTZ006  # local
        name = f" ({_name(self.code)})" if self.code < 0 else ""
        fields = {
            "time": time_,
            "host": socket.getfqdn(),
            "rank": f"{self.rank} (local_rank: {self.rank})",
            "exitcode": f"{self.code} (pid: {self.pid}) {name}",
            "error_file": self.error_file,
            "traceback": self.message.replace("\n", "\n  "),
        }
        lines = (f"  {key:<10}: {value}" for key, value in fields.items())
        return "\n".join([f"[{index}]:", *lines])


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the earliest of *failures* in whole seconds, as torchrun; of several the first."""
    return min(failures, key=lambda each: int(each.at))


def summary(name: str, failures: Sequence[Failure], first: Failure) -> str:
    """Return the summary of a run of *name* that has failed; *first* is what failed first."""
    title = f"{name} FAILED"
    texts = {each.rank: each.text(index) for index, each in enumerate(failures)}
    widest = max(len(line) for text in (title, *texts.values()) for line in text.split("\n"))
    width = min(widest, _WIDEST)
    others = [text for rank, text in texts.items() if rank != first.rank]
    parts = [
        "=" * width,
        title,
        "-" * width,
        "Failures:",
        *(others or ["  <NO_OTHER_FAILURES>"]),
        "-" * width,
        "Root Cause (first observed failure):",
        texts[first.rank],
        "=" * width,
    ]
    return "\n".join(safe_text(line) for part in parts for line in part.split("\n"))


def pass_on(first: Failure, error_file: str) -> None:
    """Write the error of *first* where the launcher's own launcher looks for it."""
    if first.record is None:
        return
    message = first.record.get("message")
    if isinstance(message, dict):
        message["errorCode"] = first.code
    with suppress(OSError):
        Path(error_file).write_text(json.dumps(first.record))


def _read(error_file: str) -> dict[str, Any] | None:
    try:
        return _table(json.loads(Path(error_file).read_text()))
    except (OSError, ValueError):
        return None


def _table(value: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _message_of(record: dict[str, Any], at: float) -> tuple[str, float]:
    """Return the text of what ``@record`` has written, and when it was."""
    message = _table(record.get("message"))
    if message is None:
        text, stamp = record.get("message", ""), record.get("timestamp", at)
    else:
        extra = _table(message.get("extraInfo")) or {}
        text = extra.get("py_callstack", message.get("message", _NONE))
        stamp = extra.get("timestamp", at)
    with suppress(TypeError, ValueError, OverflowError):
        at = dt.datetime.fromtimestamp(float(stamp), dt.UTC).timestamp()  # if there is such a day
    return str(text), at


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return _NONE
