"""Crash report: what it holds, and its form as JSON and as text.

The story of one death, as a value.

Guarantees: a report is complete in itself (it survives pickle and JSON, and needs nothing of the
process it tells of); `render` tells a person who died, why and during what in its first lines.
What an earlier or later version of phalanx wrote is read as far as it is understood; what is no
report is refused, never half believed.

Left to others: gathering what goes into it, deciding what happens next (the supervisor, whose
decision is added with `decided`), and files (`report_folder`).

What a crash report consists of: a call, what became of calls, what the kernel says.

Guarantees: plain values that survive JSON; the text of each is what a person is shown.

Frozen dataclasses out of JSON that another version, or somebody else, may have written.

Guarantees: what has a value in the JSON is of the type its field is declared with, or there is a
`ValueError` that names the field; what is missing has its default; what is not known is passed
over. So a file outlives the version that wrote it, and a foreign one is refused.

Left to others: what the values mean.
"""

from __future__ import annotations

import json
import os
import re
import signal as signals
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from phalanx.supervision import ExitKind, ExitReason

from .diagnostics import STACKS

if TYPE_CHECKING:
    from enum import Enum

    from .labels import WorkerLabels


class Fate(StrEnum):
    """What became of a call.

    ``failed``: its caller has `WorkerDied`. ``sent_again``: it runs again once the group is whole.
    ``kept``: a gather, which keeps the answers of the other ranks.
    """

    FAILED = "failed"
    SENT_AGAIN = "sent_again"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInProgress:
    """What a worker was doing when it died.

    Attributes:
        running_for: Seconds since the call was begun, or None where that is not known.
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
    """What became of a call that a death touched.

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
        elif self.fate is Fate.SENT_AGAIN:
            left = self.retries_left
            about.append(f"{left or 'no'} {'retry' if left == 1 else 'retries'} left")
        return f"{self.method} ({', '.join(about)})"


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


def said_of_calls(calls: tuple[CallFate, ...], waiting: int, shown: int = 8) -> str:
    """Return what became of *calls*, and that *waiting* more had not been sent, for people."""
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


_T = TypeVar("_T")
_Reader = Callable[[Any, str], Any]


def built(kind: type[_T], record: Mapping[str, Any], parts: Mapping[str, type[Any]]) -> _T:
    """Return the *kind* that *record* describes; *parts* are its own dataclasses, by name.

    Raises:
        ValueError: it describes none.
    """
    values: dict[str, Any] = {}
    for each in fields(cast("Any", kind)):
        if each.name in record:
            try:
                values[each.name] = _reader(str(each.type), parts)(record[each.name], each.name)
            except ValueError as error:
                raise ValueError(f"{error} in {kind.__name__}") from error
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{each.name} is missing in {kind.__name__}")
    return kind(**values)


def as_table(value: object, name: str) -> dict[str, Any]:
    """Return *value* if it is a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no object")  # noqa: TRY004  # what was written is wrong
    return cast("dict[str, Any]", value)


def _reader(declared: str, parts: Mapping[str, type[Any]]) -> _Reader:
    """Return what reads a value of the type that is *declared* so."""
    inner, is_optional = declared.removesuffix(" | None"), declared.endswith(" | None")
    if is_optional:
        read = _reader(inner, parts)
        return lambda value, name: None if value is None else read(value, name)
    several = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", inner)
    if several:
        return _each(_reader(several[1], parts))
    if inner in parts:
        kind = parts[inner]
        return lambda value, name: built(kind, as_table(value, name), parts)
    return _READERS[inner]


def _plain(*kinds: type) -> _Reader:
    def read(value: object, name: str) -> Any:
        if type(value) not in kinds:  # a bool is no number here
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{name} is a {type(value).__name__}, not {wanted},")
        return value

    return read


def _each(read: _Reader) -> _Reader:
    def read_all(value: object, name: str) -> Any:
        if not isinstance(value, list):
            raise ValueError(f"{name} is no list")  # noqa: TRY004  # as above
        return tuple(read(item, name) for item in cast("Sequence[Any]", value))

    return read_all


def _number(*kinds: type) -> _Reader:
    plain = _plain(*kinds)

    def read(value: object, name: str) -> Any:
        number = plain(value, name)
        if not -(2**63) <= number < 2**63:  # what we write fits; what does not cannot be shown
            raise ValueError(f"{name} is out of range")
        return number

    return read


def _choice(kind: type[Enum]) -> _Reader:
    text = _plain(str)
    return lambda value, name: kind(text(value, name))


def _numbers(value: object, name: str) -> Any:
    read = _number(int, float)
    return {key: read(each, name) for key, each in as_table(value, name).items()}


_READERS: Final[Mapping[str, _Reader]] = {
    "str": _plain(str),
    "bool": _plain(bool),
    "int": _number(int),
    "float": _number(float, int),
    "Mapping[str, float]": _numbers,
    "ExitKind": _choice(ExitKind),
    "Fate": _choice(Fate),
}


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
