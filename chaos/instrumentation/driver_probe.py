"""The probe in the driver: records events of groups and calls, and passes injection points on.

Guarantees: every executor that is built while the probe is installed is observed from its first
moment; events are written in the order in which they happened in its group.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from phalanx.chaos.history import events
from phalanx.chaos.history.journal import now
from phalanx.runtime import (
    GroupDown,
    GroupEnded,
    GroupUp,
    WorkerCrashed,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from phalanx.supervision import CallTimeout, ExecutorClosed, PhalanxError, WorkerDied

from .worker_probe import InstrumentedCall, ProbedWorker, TaggedReply

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.actors import Call, ExecutorSpec, Group
    from phalanx.chaos.history.journal import Journal
    from phalanx.chaos.nemesis.nemesis import Nemesis
    from phalanx.supervision import Intensity

_SAME: dict[type, type[events.Event]] = {  # what the library announces: its event here
    WorkerStarted: events.RankStarted,
    WorkerReady: events.RankReady,
    GroupUp: events.GroupUp,
    GroupDown: events.GroupDown,
    GroupEnded: events.GroupEnded,
}
_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    *((WorkerDied, "died"), (CallTimeout, "timeout"), (ExecutorClosed, "closed")),
    *((CancelledError, "cancelled"), (KeyboardInterrupt, "cancelled"), (PhalanxError, "fault")),
)  # any other exception: "error"
_FIRST_CALL = 1_000_000_000  # the calls of a further driver begin at a multiple of this


class DriverProbe:
    """Observes every group of one driver. A `Probe`.

    Args:
        number: Of the driver; 1 for the first of the run.
        intensity: Replaces that of every group; None keeps it.

    Attributes:
        groups: Those that were built, oldest first.
        outcomes: How many calls ended with each outcome, so far.
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        nemesis: Nemesis,
        number: int,
        intensity: Intensity | None,
    ) -> None:
        self.folder, self.journal, self.nemesis = folder, journal, nemesis
        self.groups: list[ObservedGroup] = []
        self.outcomes: Counter[str] = Counter()
        self._number, self._intensity = number, intensity
        self._lock = threading.Lock()
        self.calls = itertools.count((number - 1) * _FIRST_CALL + 1)  # their numbers in the run

    def adjust(self, spec: ExecutorSpec) -> ExecutorSpec:
        """Return *spec* with the intensity of the run."""
        if self._intensity is None:
            return spec
        return replace(spec, policy=replace(spec.policy, intensity=self._intensity))

    def attach(self, spec: ExecutorSpec, group: Group) -> ObservedGroup:
        """Observe the group of *spec*."""
        with self._lock:
            again = sum(each.spec.name == spec.name for each in self.groups)
            name = spec.name if not again else f"{spec.name}.{again + 1}"
            if self._number > 1:
                name = f"{name}@{self._number}"
            observed = ObservedGroup(self, name, spec, group)
            self.groups.append(observed)
        policy = spec.policy
        observed.record(
            events.GroupBuilt,
            policy,
            world_size=spec.world_size,
            intensity=policy.intensity.max_restarts,
            period=policy.intensity.period,
        )
        return observed

    def count(self, outcome: str) -> None:
        """Count a call that ended with *outcome*."""
        with self._lock:
            self.outcomes[outcome] += 1


class ObservedGroup:
    """One group. A `GroupProbe`."""

    def __init__(self, probe: DriverProbe, name: str, spec: ExecutorSpec, shared: Group) -> None:
        self.probe, self.name, self.spec, self.shared = probe, name, spec, shared

    def call_probe(self, name: str, method: Any, *, is_stream: bool) -> ObservedCall:
        """Observe a call that is being made."""
        return ObservedCall(self, name, InstrumentedCall(next(self.probe.calls), method, is_stream))

    def worker_probe(self, rank: int, incarnation: int) -> bytes:
        """Return the probe of a worker, pickled."""
        who = self.probe.folder, self.name, rank, incarnation, self.spec.cluster is not None
        return pickle.dumps(ProbedWorker(*who))

    def on_point(self, name: str, **fields: Any) -> None:
        """Record what histories have events of; pass injection points."""
        match name:
            case "event":
                self._record_event(fields["event"])
            case "planned":
                ranks, size = tuple(sorted(fields["ranks"])), fields["size"]
                self.record(events.ChangePlanned, None, ranks=ranks, world_size=size)
            case "not_started":
                self.record(events.RanksNotStarted, None, **fields)
            case "restarting":
                if again := tuple(each for each in fields["ranks"] if each[1] > 1):
                    self.probe.nemesis.reached("restarting", self, again)
            case "closing":
                ranks = tuple((info.rank, info.incarnation) for info in self.shared.view.ranks)
                self.probe.nemesis.reached("closing", self, ranks)
            case _:
                pass

    def _record_event(self, event: Any) -> None:
        match event:
            case WorkerExited(reason=reason):
                self.record(events.RankExited, event, reason=_short(reason))
            case WorkerCrashed(report=report):
                method = "" if report.call is None else report.call.method
                more = {"reason": _short(report.reason), "method": method}
                self.record(events.RankDied, report, **more)
            case _ if type(event) in _SAME:
                self.record(_SAME[type(event)], event)
            case _:
                pass

    def record(self, kind: type[events.Event], source: Any, **given: Any) -> None:
        """Record an event of *kind*: what is not *given* has the same name in *source*."""
        given |= {"at": now(), "group": self.name}
        names = [field.name for field in fields(kind) if field.name not in given]
        self.probe.journal.write(kind(**given, **{n: getattr(source, n) for n in names}))


class ObservedCall:
    """One call. A `CallProbe`."""

    def __init__(self, group: ObservedGroup, name: str, method: InstrumentedCall) -> None:
        self.method, self._group, self._name = method, group, name
        self._probe = group.probe
        self._sent: tuple[tuple[int, int], ...] = ()
        self._refused = False

    def issued(self, call: Call) -> None:
        """Record that it was made."""
        at, deadline = now(), call.options.deadline
        self._write(
            events.CallIssued,
            at=at,
            method=self._name,
            shape=call.shape.name.lower(),
            retries=call.retries,
            rank=call.rank,
            thread=threading.get_ident(),
            seconds=None if deadline is None else round(deadline - at, 6),
        )

    def before_send(self, call: Call, epoch: int, ranks: tuple[tuple[int, int], ...]) -> None:
        """Record to which ranks it goes, and pass the injection point."""
        self._sent = ranks
        self._write(events.CallSent, wire=call.wire, epoch=epoch, ranks=ranks)
        self._probe.nemesis.reached("before_send", self._group, ranks)

    def queued(self) -> None:
        """Pass the injection point."""
        self._probe.nemesis.reached("queued", self._group, self._sent)

    def settled(self, call: Call) -> None:
        """Record its outcome."""
        if not (self._refused and isinstance(call.error, CancelledError)):  # `raised` has it
            self._settle(call.error, "value" if call.failed is None else "error")

    def raised(self, error: BaseException) -> None:
        """Record what its caller got instead of its outcome."""
        self._refused = True
        self._settle(error)

    def take(self, rank: int, value: Any) -> Any:
        """Record what a reply says of itself; return its value."""
        if not isinstance(value, TaggedReply):
            return value
        said = {f"by_{f.name}": getattr(value, f.name) for f in fields(value) if f.name != "value"}
        self._write(events.ReplyReceived, rank=rank, **said)
        return value.value

    def _settle(self, error: BaseException | None, outcome: str = "error") -> None:
        outcome = next((name for kind, name in _OUTCOMES if isinstance(error, kind)), outcome)
        reports = error.reports if isinstance(error, WorkerDied) else ()
        self._write(
            events.CallSettled,
            outcome=outcome,
            error="" if error is None else type(error).__name__,
            deaths=tuple((each.rank, each.incarnation) for each in reports),
        )
        self._probe.count(outcome)

    def _write(self, kind: type[events.Event], **what: Any) -> None:
        whose: dict[str, Any] = {"group": self._group.name, "call": self.method.call}
        self._probe.journal.write(kind(**{"at": now(), **whose, **what}))


def _short(reason: object) -> str:
    return str(reason).splitlines()[0][:200]
