"""The story of one death, as a value.

Guarantees: a report is complete in itself (it survives pickle and JSON, and needs nothing of the
process it tells of); `render` tells a person who died, why and during what in its first lines;
`write` leaves either a whole file or none.

Left to others: gathering what goes into it, and deciding what happens next (the supervisor, which
adds its decision with `decided`).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from phalanx.supervision import ExitKind, ExitReason

from .events import ReportNotWritten, ReportWritten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .labels import WorkerLabels

# In a log record within a report: said above it, or shown first.
_KNOWN: Final = ("timestamp", "level", "event", "group", "rank", "incarnation", "epoch", "pid")
_BRIEF: Final = 2000  # characters; five such texts, escaped at the worst, still fit into one record


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInProgress:
    """What a worker was doing when it died.

    Attributes:
        running_for: Seconds since the call was begun, or None where that is not known.
    """

    method: str
    call_id: int
    running_for: float | None = None

    def __str__(self) -> str:
        took = "" if self.running_for is None else f", running for {self.running_for:.3f} s"
        return f"{self.method} (call {self.call_id}{took})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitEvidence:
    """What the kernel says about how a process ended.

    Attributes:
        code: Its exit code, or None where a signal ended it or nobody knows.
        signal: The signal that ended it, or None.
        core_dumped: Whether the kernel wrote a core file.
        oom: What speaks for an out-of-memory kill; empty for nothing.
        rusage: What it used, by the names of ``struct rusage``; empty where not known.
    """

    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    oom: str = ""
    rusage: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """One death of one incarnation.

    Attributes:
        child: Its path in the supervision tree.
        call: The call it was running, or None where it was running none.
        logs: Its last structured log records, oldest first, one JSON text each.
        stdout: The end of what it wrote there.
        stderr: The end of what it wrote there.
        last_words: The traceback of an exception nobody caught, or the stacks a fatal signal
            left; empty where it died without a word.
        stacks: The stacks of all its threads, taken before it was killed for hanging.
        decision: What the supervisor did about it; empty until it has decided.
        why: Why it decided so.
        at: When it was known dead, wall clock, ISO 8601 with zone.
        at_monotonic: The same on the monotonic clock of the driver, in seconds.
        ran_for: Seconds since it was started, or None where that is not known.
    """

    child: str
    group: str
    rank: int | None
    incarnation: int
    epoch: int
    pid: int | None
    device: str
    reason: ExitReason
    at: str
    at_monotonic: float
    ran_for: float | None = None
    coordinates: str = ""
    call: CallInProgress | None = None
    logs: tuple[str, ...] = ()
    stdout: str = ""
    stderr: str = ""
    last_words: str = ""
    stacks: str = ""
    evidence: ExitEvidence = ExitEvidence()
    decision: str = ""
    why: str = ""

    @classmethod
    def of(
        cls, labels: WorkerLabels, reason: ExitReason, *, at: str, at_monotonic: float, **rest: Any
    ) -> CrashReport:
        """Return the report on the worker called *labels*; *rest* are further fields."""
        return cls(
            child=labels.child,
            group=labels.group,
            rank=labels.rank,
            incarnation=labels.incarnation,
            epoch=labels.epoch,
            pid=labels.pid or None,
            device=labels.device,
            coordinates=labels.coordinates,
            reason=reason,
            at=at,
            at_monotonic=at_monotonic,
            **rest,
        )

    def decided(self, decision: str, why: str) -> CrashReport:
        """Return the report with what the supervisor did and why."""
        return replace(self, decision=decision, why=why)

    def brief(self) -> CrashReport:
        """Return the report with the last 2000 characters of each text, for a log."""
        logs: list[str] = []
        room = _BRIEF
        for line in reversed(self.logs):
            room -= len(line)
            if room < 0:
                break
            logs.append(line)
        return replace(
            self,
            logs=tuple(reversed(logs)),
            stdout=self.stdout[-_BRIEF:],
            stderr=self.stderr[-_BRIEF:],
            last_words=self.last_words[-_BRIEF:],
            stacks=self.stacks[-_BRIEF:],
        )

    @property
    def name(self) -> str:
        """The short name of who died: group, rank and incarnation."""
        who = self.group if self.rank is None else f"{self.group}/{self.rank}"
        return f"{who} #{self.incarnation}"

    def to_json(self) -> str:
        """Return the report as one JSON object, in ASCII."""
        record = asdict(self)
        record["evidence"]["rusage"] = dict(self.evidence.rusage)
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> CrashReport:
        """Return the report `to_json` made *text* from.

        Raises:
            ValueError: *text* is no crash report.
        """
        try:
            record: dict[str, Any] = json.loads(text)
            reason: dict[str, Any] = record["reason"]
            call = record.get("call")
            record["reason"] = ExitReason(ExitKind(reason.pop("kind")), **reason)
            record["call"] = CallInProgress(**call) if call else None
            record["evidence"] = ExitEvidence(**record["evidence"])
            record["logs"] = tuple(record["logs"])
            return cls(**record)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a crash report: {error}") from error

    def render(self) -> str:
        """Return the report as a text for people, the answer first and the details after it."""
        head = [
            f"{self.name} ({self.child}) died: {self.reason}",
            f"  doing     {self.call or 'nothing: it was between calls'}",
            f"  then      {self._story()}",
            f"  process   {self._process()}",
            f"  when      {self.at}",
        ]
        evidence = self._evidence()
        if evidence:
            head.append(f"  evidence  {evidence}")
        sections = [
            ("last words", self.last_words),
            ("stacks before it was killed", self.stacks),
            ("stderr, its end", self.stderr),
            ("stdout, its end", self.stdout),
            ("log, its end", "\n".join(map(_log_line, self.logs))),
        ]
        parts = ["\n".join(head)]
        parts += [f"--- {title}\n{_last_lines(text)}" for title, text in sections if text.strip()]
        if len(parts) == 1:
            parts.append("It left no output.")
        return "\n".join(parts) + "\n"

    def write(self, directory: str | os.PathLike[str]) -> ReportWritten | ReportNotWritten:
        """Put the report into a file of its own in *directory*, whole or not at all.

        The directory is made where it is missing. Only this user may read the file. A disk that
        is full or not writable is told in the event returned, never raised: whoever writes
        reports is busy with a death already.
        """
        try:
            path = self._write(Path(directory))
        except OSError as error:
            return ReportNotWritten(
                directory=os.fspath(directory), problem=str(error), at=time.monotonic()
            )
        return ReportWritten(path=str(path), at=time.monotonic())

    def _write(self, folder: Path) -> Path:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stem = _file_name(f"{self.group}-{self.rank}-{self.incarnation}-{self.pid}")
        descriptor, temporary = tempfile.mkstemp(prefix=f".{stem}-", dir=folder)  # 0600 by nature
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(self.to_json())
                file.flush()
                os.fsync(file.fileno())  # a full disk speaks up here at the latest
            path = folder / f"{_file_name(self.at)}-{stem}.json"
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        return path

    def _story(self) -> str:
        if not self.decision:
            return "nothing decided yet"
        return f"{self.decision}, because {self.why}" if self.why else self.decision

    def _process(self) -> str:
        parts = [f"pid {self.pid}" if self.pid else "no process", f"epoch {self.epoch}"]
        parts += [part for part in (self.coordinates, self.device) if part]
        if self.ran_for is not None:
            parts.append(f"ran for {self.ran_for:.3f} s")
        return ", ".join(parts)

    def _evidence(self) -> str:
        seen = self.evidence
        parts: list[str] = []
        if seen.code is not None:
            parts.append(f"exit code {seen.code}")
        if seen.signal is not None:
            parts.append(f"signal {seen.signal}")
        if seen.core_dumped:
            parts.append("core dumped")
        if seen.oom:
            parts.append(f"out of memory: {seen.oom}")
        parts += [f"{name}={value:g}" for name, value in seen.rusage.items()]
        return ", ".join(parts)


def _log_line(text: str) -> str:
    """Return one JSON log record as a person reads it, or as it is where it is none."""
    try:
        loaded: object = json.loads(text)
    except ValueError:
        return text
    if not isinstance(loaded, dict):
        return text
    record = cast("dict[str, Any]", loaded)
    clock = str(record.get("timestamp", ""))[11:23]
    shown = " ".join(f"{key}={value!r}" for key, value in record.items() if key not in _KNOWN)
    return f"{clock} {record.get('level', '')} {record.get('event', '')} {shown}".strip()


def _last_lines(text: str, limit: int = 40) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) > limit:
        lines = [f"({len(lines) - limit} lines before these)", *lines[-limit:]]
    return "\n".join(f"  {line}" for line in lines)


def _file_name(text: str) -> str:
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in text)
