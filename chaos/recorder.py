"""The driver's side of a run: writes down what groups and calls do, and passes points on.

Guarantees: every executor that is built while it is installed is watched from its first moment;
each record is written in the order in which its group did what it tells. Nothing here raises into
what is watched.

Left to others: what happens at a point (`Ambush`, set by the `striker`).
"""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.runtime import (
    GroupDown,
    GroupEnded,
    GroupUp,
    WorkerCrashed,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from phalanx.supervision import (
    CallTimeout,
    ExecutorClosed,
    ExitReason,
    Intensity,
    PhalanxError,
    WorkerDied,
)

from . import call_records, group_records
from .envelope import Letter, Order, Reply
from .journal import now
from .witness import Post, is_claimed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phalanx.actors import Call, ExecutorSpec, Shared

    from .journal import Journal
    from .record import Record

_FIRST_CALL = 1_000_000_000  # calls of a further life begin at a multiple of this


class Ambush(Protocol):
    """What waits at the points."""

    def orders(self, group: Watched, shape: str, rank: int | None) -> tuple[Order, ...]:
        """Return what workers are to do to themselves in a call that is being made."""
        ...

    def start_orders(self, group: Watched, rank: int) -> tuple[Order, ...]:
        """Return what is to go wrong in a start of *rank*."""
        ...

    def back(self, used: tuple[Order, ...], unused: tuple[Order, ...]) -> None:
        """The call that held these orders is over."""
        ...

    def reached(self, point: str, group: Watched, ranks: tuple[tuple[int, int], ...]) -> None:
        """*point* is passed by these (rank, incarnation); be quick."""
        ...


class Recorder:
    """Watches every group of one driver. A `Probe`.

    Attributes:
        groups: Those that were built, oldest first.
        settled: Calls by outcome, so far.
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        ambush: Ambush,
        *,
        life: int = 1,
        widened: Intensity | None = None,
    ) -> None:
        self.folder = folder
        self.journal = journal
        self.ambush = ambush
        self.groups: list[Watched] = []
        self.settled: dict[str, int] = {}
        self._life = life
        self._widened = widened
        self._lock = threading.Lock()
        self._calls = itertools.count((life - 1) * _FIRST_CALL + 1)

    def adjust(self, spec: ExecutorSpec) -> ExecutorSpec:
        """Return *spec* with an intensity that the run cannot exceed, where that is wanted."""
        if self._widened is None:
            return spec
        return replace(spec, intensity=self._widened)

    def attach(self, spec: ExecutorSpec, shared: Shared) -> Watched:
        """Watch the group of *spec*."""
        with self._lock:
            again = sum(group.spec.name == spec.name for group in self.groups)
            name = spec.name if not again else f"{spec.name}.{again + 1}"
            if self._life > 1:
                name = f"{name}@{self._life}"
            group = Watched(self, name, spec, shared)
            self.groups.append(group)
        self.journal.write(
            group_records.GroupBuilt(
                at=now(),
                group=name,
                world_size=spec.world_size,
                strategy=str(spec.strategy),
                intensity=spec.intensity.max_restarts,
                period=spec.intensity.period,
                restart=str(spec.restart),
                survivors=spec.survivors,
                standby=spec.standby,
                pid=os.getpid(),
            )
        )
        return group

    def next_call(self) -> int:
        """Return a number that no other call of the run has."""
        return next(self._calls)

    def count(self, outcome: str) -> None:
        """Count a call that ended with *outcome*."""
        with self._lock:
            self.settled[outcome] = self.settled.get(outcome, 0) + 1


class Watched:
    """One group. A `GroupProbe`."""

    def __init__(self, recorder: Recorder, name: str, spec: ExecutorSpec, shared: Shared) -> None:
        self.recorder = recorder
        self.name = name
        self.spec = spec
        self.shared = shared
        self._write = recorder.journal.write

    # --- calls --------------------------------------------------------------------------

    def tap(
        self, name: str, method: Any, *, shape: str, rank: int | None, is_stream: bool
    ) -> WatchedCall:
        """Watch a call that is being made."""
        orders = self.recorder.ambush.orders(self, shape, rank)
        letter = Letter(self.recorder.next_call(), method, is_stream, orders)
        return WatchedCall(self, name, letter)

    # --- ranks --------------------------------------------------------------------------

    def witness(self, rank: int, incarnation: int) -> bytes:
        """Return what watches a worker from within."""
        start = self.recorder.ambush.start_orders(self, rank) if incarnation > 1 else ()
        post = Post(
            folder=str(self.recorder.folder),
            group=self.name,
            rank=rank,
            incarnation=incarnation,
            start=start,
        )
        return post.pickled()

    def happened(self, event: Any) -> None:
        """Write *event* down, if it is one that histories tell of."""
        tell = _TELLINGS.get(event.__class__)
        if tell is not None:
            self._write(tell(self.name, event))

    def planned(self, ranks: frozenset[int], size: int | None) -> None:
        """Write down that a restart or a resize was asked for."""
        change = group_records.ChangePlanned(
            at=now(), group=self.name, ranks=tuple(sorted(ranks)), world_size=size
        )
        self._write(change)

    def not_started(self, ranks: tuple[tuple[int, int], ...], reason: str) -> None:
        """Write down that *ranks* got no process."""
        self._write(group_records.NotStarted(at=now(), group=self.name, ranks=ranks, reason=reason))

    def restarting(self, ranks: tuple[tuple[int, int], ...]) -> None:
        """Pass the point, unless this is the first start."""
        again = tuple((rank, incarnation) for rank, incarnation in ranks if incarnation > 1)
        if again:
            self.recorder.ambush.reached("restarting", self, again)

    def closing(self) -> None:
        """Pass the point."""
        ranks = tuple((info.rank, info.incarnation) for info in self.shared.view.ranks)
        self.recorder.ambush.reached("closing", self, ranks)


class WatchedCall:
    """One call. A `CallTap`."""

    def __init__(self, group: Watched, name: str, letter: Letter) -> None:
        self.method = letter
        self._group = group
        self._name = name
        self._recorder = group.recorder
        self._write = group.recorder.journal.write
        self._sent: tuple[tuple[int, int], ...] = ()
        self._refused = False

    def issued(self, call: Call) -> None:
        """Write down that it was made."""
        at, deadline = now(), call.terms.deadline
        self._write(
            call_records.Issued(
                at=at,
                group=self._group.name,
                call=self.method.call,
                method=self._name,
                shape=call.shape.name.lower(),
                on_death=call.terms.on_death,
                retries=call.retries,
                rank=call.rank,
                thread=threading.get_ident(),
                seconds=None if deadline is None else round(deadline - at, 6),
            )
        )

    def before_send(self, call: Call, epoch: int, ranks: tuple[tuple[int, int], ...]) -> None:
        """Write down to whom it goes, and pass the point."""
        self._sent = ranks
        self._write(
            call_records.Sent(
                at=now(),
                group=self._group.name,
                call=self.method.call,
                wire=call.wire,
                epoch=epoch,
                ranks=ranks,
            )
        )
        self._recorder.ambush.reached("before_send", self._group, ranks)

    def queued(self) -> None:
        """Pass the point."""
        self._recorder.ambush.reached("queued", self._group, self._sent)

    def settled(self, call: Call) -> None:
        """Write down what became of it."""
        if self._refused and isinstance(call.error, CancelledError):
            return  # it has its outcome: what `raised` was told
        if call.error is not None:
            self._settle(call.error)
        else:
            self._settle(None, "value" if call.failed is None else "error")

    def raised(self, error: BaseException) -> None:
        """Write down what its caller got in place of its end."""
        self._refused = True
        self._settle(error)

    def take(self, rank: int, value: Any) -> Any:
        """Write down what it says of itself; return what is in it."""
        if not isinstance(value, Reply):
            return value
        self._write(
            call_records.Taken(
                at=now(),
                group=self._group.name,
                call=self.method.call,
                rank=rank,
                by_call=value.call,
                by_rank=value.rank,
                by_incarnation=value.incarnation,
                by_wire=value.wire,
                by_item=value.item,
            )
        )
        return value.value

    def _settle(self, error: BaseException | None, outcome: str = "") -> None:
        if error is not None:
            outcome = _outcome_of(error)
        reports = error.reports if isinstance(error, WorkerDied) else ()
        self._write(
            call_records.Settled(
                at=now(),
                group=self._group.name,
                call=self.method.call,
                outcome=outcome,
                error="" if error is None else type(error).__name__,
                deaths=tuple((each.rank, each.incarnation) for each in reports),
            )
        )
        self._recorder.count(outcome)
        folder = self._recorder.folder
        orders = self.method.orders
        if orders:
            used = tuple(order for order in orders if is_claimed(folder, order))
            self._recorder.ambush.back(used, tuple(o for o in orders if o not in used))


def _outcome_of(error: BaseException) -> str:
    match error:
        case WorkerDied():
            return "died"
        case CallTimeout():
            return "timeout"
        case ExecutorClosed():
            return "closed"
        case CancelledError() | KeyboardInterrupt():
            return "cancelled"
        case PhalanxError():
            return "fault"
        case _:
            return "error"


def _who(group: str, event: Any) -> dict[str, Any]:
    return {
        "at": now(),
        "group": group,
        "rank": event.rank,
        "incarnation": event.incarnation,
        "epoch": event.epoch,
        "pid": event.pid or 0,
    }


def _started(group: str, event: WorkerStarted) -> Record:
    return group_records.RankStarted(**_who(group, event))


def _ready(group: str, event: WorkerReady) -> Record:
    return group_records.RankReady(**_who(group, event))


def _exited(group: str, event: WorkerExited) -> Record:
    return group_records.RankExited(**_who(group, event), reason=_short(event.reason))


def _crashed(group: str, event: WorkerCrashed) -> Record:
    report = event.report
    return group_records.RankDied(
        **_who(group, report),
        reason=_short(report.reason),
        method="" if report.call is None else report.call.method,
        decision=report.decision,
    )


def _up(group: str, event: GroupUp) -> Record:
    return group_records.GroupUp(
        at=now(), group=group, epoch=event.epoch, world_size=event.world_size
    )


def _down(group: str, event: GroupDown) -> Record:
    return group_records.GroupDown(at=now(), group=group, epoch=event.epoch, cause=event.cause)


def _ended(group: str, event: GroupEnded) -> Record:
    return group_records.GroupEnded(at=now(), group=group, epoch=event.epoch, cause=event.cause)


def _short(reason: ExitReason) -> str:
    return str(reason).splitlines()[0][:200]


_TELLINGS: dict[type, Callable[[str, Any], Record]] = {
    WorkerStarted: _started,
    WorkerReady: _ready,
    WorkerExited: _exited,
    WorkerCrashed: _crashed,
    GroupUp: _up,
    GroupDown: _down,
    GroupEnded: _ended,
}
