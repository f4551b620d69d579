"""The story of one death, as a value.

Guarantees: a report is complete in itself (it survives pickle and JSON, and needs nothing of the
process it tells of); `render` tells a person who died, why and during what in its first lines.
What an earlier or later version of phalanx wrote is read as far as it is understood; what is no
report is refused, never half believed.

Left to others: gathering what goes into it, deciding what happens next (the supervisor, whose
decision is added with `decided`), and files (`report_folder`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from phalanx.supervision import ExitReason

from .circumstances import CallFate, CallInProgress, ExitEvidence, said_of_calls
from .json_values import as_table, built

if TYPE_CHECKING:
    from .labels import WorkerLabels

SCHEMA: Final = "phalanx.crash_report/1"
"""Rises where a reader of the former one would understand a report wrongly."""

# In a log record within a report: said above it, or shown first.
_KNOWN: Final = ("timestamp", "level", "event", "group", "rank", "incarnation", "epoch", "pid")
_BRIEF: Final = 2000  # characters; five such texts, escaped at the worst, still fit into one record
_BRIEF_CALLS: Final = 10
_MOST_CALLS: Final = 100  # in a report; a queue is rarely that long


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
        calls: What became of the calls that it touched, in the order of their numbers; the first
            hundred of them.
        waiting: How many more calls had not been sent, and wait.
        checkpoint: What state the next incarnation is given; empty where there is none.
        host: The machine.
        driver: The process that held the group.
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
    evidence: ExitEvidence = field(default_factory=ExitEvidence)
    decision: str = ""
    why: str = ""
    calls: tuple[CallFate, ...] = ()
    waiting: int = 0
    checkpoint: str = ""
    host: str = ""
    driver: int | None = None

    @classmethod
    def of(
        cls, labels: WorkerLabels, reason: ExitReason, *, at: str, at_monotonic: float, **rest: Any
    ) -> CrashReport:
        """Return the report on the worker called *labels*; *rest* are further fields."""
        where: dict[str, Any] = {"host": os.uname().nodename, "driver": os.getpid()}
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
            **{**where, **rest},
        )

    def decided(self, decision: str, why: str) -> CrashReport:
        """Return the report with what the supervisor did and why."""
        return replace(self, decision=decision, why=why)

    def settled(self, calls: tuple[CallFate, ...], waiting: int) -> CrashReport:
        """Return the report with what became of calls."""
        return replace(self, calls=calls[:_MOST_CALLS], waiting=waiting)

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
            calls=self.calls[:_BRIEF_CALLS],
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
        return json.dumps({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> CrashReport:
        """Return the report `to_json` made *text* from.

        Raises:
            ValueError: *text* is no crash report; it says why.
        """
        try:
            loaded: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a crash report, or a torn one: {error}") from error
        record = as_table(loaded, "the report")
        schema = record.get("schema", SCHEMA)
        if not isinstance(schema, str):
            raise ValueError("not a crash report: its schema is no text")  # noqa: TRY004  # as above
        name, _, version = schema.rpartition("/")
        if name != SCHEMA.rpartition("/")[0]:
            raise ValueError(f"not a crash report: its schema is {schema!r}")
        try:
            return built(cls, record, _PARTS)
        except ValueError as error:
            newer = version.isdigit() and int(version) > int(SCHEMA.rpartition("/")[2])
            also = f"; a later phalanx wrote it (schema {schema})" if newer else ""
            raise ValueError(f"not a crash report: {error}{also}") from error

    def render(self) -> str:
        """Return the report as a text for people, the answer first and the details after it."""
        told = {
            "doing": str(self.call or "nothing: it was between calls"),
            "then": self._story(),
            "calls": said_of_calls(self.calls, self.waiting),
            "state": self.checkpoint,
            "evidence": str(self.evidence),
            "process": self._process(),
            "when": self.at,
        }
        head = [f"{self.name} ({self.child}) died: {self.reason}"]
        head += [f"  {title:<10}{text}" for title, text in told.items() if text]
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

    def _story(self) -> str:
        if not self.decision:
            return "nothing decided yet"
        return f"{self.decision}, because {self.why}" if self.why else self.decision

    def _process(self) -> str:
        parts = [f"pid {self.pid}" if self.pid else "no process", f"epoch {self.epoch}"]
        parts += [part for part in (self.coordinates, self.device) if part]
        if self.ran_for is not None:
            parts.append(f"ran for {self.ran_for:.3f} s")
        if self.host:
            parts.append(f"on {self.host}")
        return ", ".join(parts)


_PARTS: Final = {
    "ExitReason": ExitReason,
    "ExitEvidence": ExitEvidence,
    "CallInProgress": CallInProgress,
    "CallFate": CallFate,
}


def _log_line(text: str) -> str:
    """Return one JSON log record as a person reads it, or as it is where it is none."""
    try:
        loaded: object = json.loads(text)
        if not isinstance(loaded, dict):
            return text
        record = cast("dict[str, Any]", loaded)
        clock = str(record.get("timestamp", ""))[11:23]
        shown = " ".join(f"{key}={value!r}" for key, value in record.items() if key not in _KNOWN)
        return f"{clock} {record.get('level', '')} {record.get('event', '')} {shown}".strip()
    except (ValueError, RecursionError):
        return text


def _last_lines(text: str, limit: int = 40) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) > limit:
        lines = [f"({len(lines) - limit} lines before these)", *lines[-limit:]]
    return "\n".join(f"  {line}" for line in lines)
