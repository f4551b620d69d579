"""Crash report: the record of one death, and its form as JSON and as text.

- A report is complete in itself: it survives pickle and JSON.
- JSON of another version is read as far as it is understood: missing fields have their defaults,
  unknown ones are ignored, and a field of another type is a `ValueError`.
"""

from __future__ import annotations

import json
import os
import signal as signals
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum, StrEnum
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, get_args, get_origin, get_type_hints

from phalanx.supervision import ExitReason

from .diagnostics import STACKS
from .safe_text import safe_text

if TYPE_CHECKING:
    from .events import WorkerLabels


_T = TypeVar("_T")
_ENDLESS = 1 << 20  # so many retries are a caller's way to leave the limit to the intensity


class Fate(StrEnum):
    """The outcome of a call.

    ``failed``: its caller has `WorkerDied`. ``sent_again``: it runs again once the group is up.
    ``kept``: a gather, which keeps the answers of the other ranks.
    """

    FAILED = "failed"
    SENT_AGAIN = "sent_again"
    KEPT = "kept"


class Lost(StrEnum):
    """The extent of a death: the process of the rank, the link to it, or all of its node."""

    RANK = "rank"
    LINK = "link"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInProgress:
    """The call that a worker was running when it died.

    Attributes:
        running_for: Seconds since the call was begun; None if unknown.
        abandoned: Whether it had been settled without this rank: it had timed out, or was cancelled
            or interrupted, or another rank had raised.
    """

    method: str
    call_id: int
    running_for: float | None = None
    abandoned: bool = False

    def __str__(self) -> str:
        about = [f"call {self.call_id}"]
        if self.running_for is not None:
            about.append(f"running for {self.running_for:.3f} s")
        if self.abandoned:
            about.append("abandoned by its caller")
        return f"{self.method} ({', '.join(about)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFate:
    """The outcome of a call that a death affected.

    Attributes:
        begun: Whether a rank had begun it; one that none had is sent again at no cost.
        retries_left: How often another death may send it again.
    """

    method: str
    call_id: int
    fate: Fate
    begun: bool = True
    retries_left: int = 0

    def __str__(self) -> str:
        about = [f"call {self.call_id}"]
        if not self.begun:
            about.append("no rank had begun it")
        elif self.fate is Fate.SENT_AGAIN and (left := self.retries_left) < _ENDLESS:
            about.append(f"{left or 'no'} {'retry' if left == 1 else 'retries'} left")
        return f"{self.method} ({', '.join(about)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitEvidence:
    """Exit status of a process, and further evidence of the kernel about its end.

    Attributes:
        code: Its exit code; None if a signal ended it or it is unknown.
        signal: The signal that ended it, or None.
        oom: Evidence of an out-of-memory kill; empty if there is none.
        rusage: Its use of resources, by the names of ``struct rusage``; empty if unknown.
    """

    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    oom: str = ""
    rusage: Mapping[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        parts: list[str] = []
        if self.code is not None:
            parts.append(f"exit code {self.code}")
        if self.signal is not None:
            known = {int(each): each.name for each in signals.Signals}
            known[STACKS] = f"signal {STACKS}, ours: it writes its stacks and ends"
            parts.append(known.get(self.signal, f"signal {self.signal}"))
        if self.core_dumped:
            parts.append("core dumped")
        if self.oom:
            parts.append(f"out of memory: {self.oom}")
        if "ru_maxrss" in self.rusage:  # in KiB, on Linux
            parts.append(f"at most {self.rusage['ru_maxrss'] / 1024:.1f} MiB resident")
        if "ru_utime" in self.rusage:
            seconds = self.rusage["ru_utime"] + self.rusage.get("ru_stime", 0.0)
            parts.append(f"{seconds:.2f} s of processor time")
        return "; ".join(parts)


def _describe_calls(calls: tuple[CallFate, ...], waiting: int, shown: int = 8) -> str:
    """Return in words what became of *calls*, and that *waiting* more had not been sent."""
    titles = {
        Fate.FAILED: "failed",
        Fate.SENT_AGAIN: "sent again",
        Fate.KEPT: "answers of the other ranks kept",
    }
    parts: list[str] = []
    for fate, title in titles.items():
        those = [call for call in calls if call.fate is fate]
        if those:
            more = f" and {len(those) - shown} more" if len(those) > shown else ""
            parts.append(f"{title}: {', '.join(map(str, those[:shown]))}{more}")
    if waiting:
        parts.append(f"not sent yet, and waiting: {waiting}")
    return "; ".join(parts)


def _read(kind: Any, value: Any, name: str) -> Any:
    """Return *value*, out of JSON, as the type *kind* of the field *name*.

    Raises:
        ValueError: it is of another type.
    """
    inner = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _read(inner[0], value, name)
    if get_origin(kind) is tuple:
        return tuple(_read(inner[0], each, name) for each in _read(list, value, name))
    if get_origin(kind) is Mapping:
        return {key: _read(inner[1], each, name) for key, each in _read(dict, value, name).items()}
    if is_dataclass(kind):
        return _read_fields(cast("type[Any]", kind), _read(dict, value, name))
    if issubclass(kind, Enum):
        return kind(_read(str, value, name))
    if type(value) is not kind and not (kind is float and type(value) is int):
        wanted = "int or float" if kind is float else kind.__name__
        raise ValueError(f"{name} is a {type(value).__name__}, not {wanted}")
    if kind in (int, float) and not -(2**63) <= value < 2**63:  # what we write fits
        raise ValueError(f"{name} is out of range")
    return value


def _read_fields(kind: type[_T], record: Mapping[str, Any]) -> _T:
    hints = get_type_hints(kind, localns={"ExitReason": ExitReason})
    values: dict[str, Any] = {}
    for each in fields(cast("Any", kind)):
        if each.name in record:
            try:
                values[each.name] = _read(hints[each.name], record[each.name], each.name)
            except ValueError as error:
                raise ValueError(f"{error}, in {kind.__name__}") from error
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{each.name} is missing in {kind.__name__}")
    return kind(**values)


SCHEMA: Final = "phalanx.crash_report/1"
"""Rises if a reader of the former one would misread a report."""

# Fields of a log record within a report that are shown elsewhere.
_KNOWN: Final = ("timestamp", "level", "event", "group", "rank", "incarnation", "epoch", "pid")
_BRIEF: Final = 2000  # characters; five such texts, fully escaped, fit into one log record
_BRIEF_CALLS: Final = 10
_UNFENCED: Final = "a report of the node or its starter, or the end of its lease, is awaited"
_MOST_CALLS: Final = 100  # in a report; a queue is rarely that long


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """One death of one incarnation.

    Attributes:
        child: Its path in the supervision tree.
        call: The call it was running, or None.
        logs: Its last structured log records, oldest first, one JSON text each.
        last_words: The traceback of an uncaught exception, or the stacks that a fatal signal left.
        stacks: The stacks of all its threads, taken before it was killed for hanging.
        decision: The supervisor's decision; empty until there is one.
        calls: The outcomes of the calls that it affected, by number; at most the first hundred.
        waiting: The number of further calls that had not been sent, and wait.
        checkpoint: The state that the next incarnation gets; empty if there is none.
        driver: The process that held the group.
        at: When the death became known, wall clock, ISO 8601 with zone.
        at_monotonic: The same on the monotonic clock of the driver, in seconds.
        ran_for: Seconds since it was started; None if unknown.
        host: The machine that it was on.
        lost: The extent of the loss; if it is the link, the process was killed for that.
        node: The number of its node on a cluster; None elsewhere.
        fenced: How it is known that nothing of a lost node runs any longer; empty until it is.
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
    lost: Lost = Lost.RANK
    node: int | None = None
    fenced: str = ""

    @classmethod
    def of(
        cls, labels: WorkerLabels, reason: ExitReason, *, at: str, at_monotonic: float, **rest: Any
    ) -> CrashReport:
        """Return the report of the worker *labels*; *rest* are further fields."""
        about: dict[str, Any] = {**asdict(labels), "pid": labels.pid or None}
        about |= {"host": os.uname().nodename, "driver": os.getpid(), **rest}
        return cls(**about, reason=reason, at=at, at_monotonic=at_monotonic)

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
        """Group, rank and incarnation of the worker."""
        who = self.group if self.rank is None else f"{self.group}/{self.rank}"
        return f"{who} #{self.incarnation}"

    def to_json(self) -> str:
        """Return the report as one JSON object, in ASCII."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> CrashReport:
        """Return the report `to_json` made *text* from.

        Raises:
            ValueError: *text* is no crash report.
        """
        try:
            record = _read(dict, json.loads(text), "the report")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a crash report, or a torn one: {error}") from error
        schema = str(record.get("schema", SCHEMA))
        name, _, version = schema.rpartition("/")
        if name != SCHEMA.rpartition("/")[0]:
            raise ValueError(f"not a crash report: its schema is {schema!r}")
        try:
            return _read_fields(cls, record)
        except ValueError as error:
            newer = version.isdigit() and int(version) > int(SCHEMA.rpartition("/")[2])
            also = f"; a later phalanx wrote it (schema {schema})" if newer else ""
            raise ValueError(f"not a crash report: {error}{also}") from error

    def render(self) -> str:
        """Return the report as text: a summary, then the details."""
        facts = {
            "doing": str(self.call or "nothing: it was between calls"),
            "then": self._describe_decision(),
            "calls": _describe_calls(self.calls, self.waiting),
            "state": self.checkpoint,
            "lost": self._lost(),
            "evidence": str(self.evidence),
            "process": self._process(),
            "when": self.at,
        }
        head = [f"{self.name} ({self.child}) died: {self.reason}"]
        head += [f"  {title:<10}{text}" for title, text in facts.items() if text]
        sections = [
            ("last words", self.last_words),
            ("stacks before it was killed", self.stacks),
            ("stderr, its end", self.stderr),
            ("stdout, its end", self.stdout),
            ("log, its end", "\n".join(map(_log_line, self.logs))),
        ]
        parts = ["\n".join(map(safe_text, head))]
        parts += [f"--- {title}\n{_last_lines(text)}" for title, text in sections if text.strip()]
        if len(parts) == 1:
            parts.append("It left no output.")
        return "\n".join(parts) + "\n"

    def _describe_decision(self) -> str:
        if not self.decision:
            return "nothing decided yet"
        return f"{self.decision}, because {self.why}" if self.why else self.decision

    def _lost(self) -> str:
        match self.lost:
            case Lost.RANK:
                return "" if self.node is None else f"the rank alone, on node {self.node}"
            case Lost.LINK:
                return "the link to it; the process was then killed"
            case Lost.NODE:
                yet = f"not yet fenced: {_UNFENCED}"
                known = f"fenced: {self.fenced}" if self.fenced else yet
                return f"node {self.node}, with all of its ranks; {known}"

    def _process(self) -> str:
        parts = [f"pid {self.pid}" if self.pid else "no process", f"epoch {self.epoch}"]
        parts += [part for part in (self.coordinates, self.device) if part]
        if self.ran_for is not None:
            parts.append(f"ran for {self.ran_for:.3f} s")
        if self.host:
            parts.append(f"on {self.host}")
        return ", ".join(parts)


def _log_line(text: str) -> str:
    """Return a JSON log record as a line of text, or *text* if it is none."""
    try:
        record: dict[str, Any] = _read(dict, json.loads(text), "a record")
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
