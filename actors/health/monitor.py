"""Health monitor: finds ranks past their limits, examines them, and has the hung ones ended.

When to look whether a rank hangs, and what of the looks counts.

Guarantees: while ranks owe answers somebody looks often enough; at rest no timer runs. A rank is
judged by how long it has been running its call, as its own page tells, never by how long a call
has waited; without a limit only a rank that is stopped (and not traced) is. When this process
itself was paused (Ctrl-Z, a suspended machine), what the ranks wrote meanwhile is read first, and
every limit begins anew: it was we who kept them waiting.

Left to others: stacks and killing (`stopping`), what is found before (`suspicion`).

When a rank of a group is suspected to hang, and what is done about it.

Guarantees: whoever is suspected is examined first, and let go where the suspicion holds no more; a
rank that was asked to stop has its own deadlines and is not suspected.

Left to others: when to look (`watch`), what the examined were doing (`examination`), who cannot
leave an old process group (`leaving`), ending them (`stopping`).

What ranks that hang were doing, found out before they are ended.

Guarantees: they are asked for a sign of life first, and whoever gives none is not waited for longer
than a moment. A rank that has gone on with other work meanwhile is let go. Where some of them only
wait in a collective operation for another, that other alone is ended, once its own time is over: it
is the one that hangs, and the rest comes free by its death.

Left to others: when a rank is suspected (`watch`), ending it (`stopping`).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx.actors.calls.rank import Running
from phalanx.actors.group.messages import (
    Examined,
    LeaveDue,
    Look,
    OutOfStep,
    Overdue,
    ReformOverdue,
)
from phalanx.runtime import Vitals
from phalanx.supervision import Phase, RankState

from .survivors import Leavings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx.actors.group.handle import Shared
    from phalanx.actors.group.members import Members
    from phalanx.actors.group.messages import Notice
    from phalanx.actors.group.shutdown import Stopping
    from phalanx.actors.group.worker import Member
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Hub, Timer
    from phalanx.supervision import GroupState

    from .heartbeat import Pulses, Question, Sign


_PATIENCE = 0.5  # seconds for a sign of life; one that can give it does so within milliseconds


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that seems to hang.

    Attributes:
        why: What speaks for it.
        holds: Whether that is still so.
        in_call: Whether it is suspected for the time that a call takes.
    """

    rank: int
    incarnation: int
    why: str
    holds: Callable[[], bool]
    in_call: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank that is to be ended, why, and what it was found doing."""

    member: Member
    why: str
    seen: str


class Examinations:
    """Those that are under way. Used by the executor's actor alone."""

    def __init__(
        self,
        pulses: Pulses,
        hub: Hub,
        tell: Callable[[Examined], None],
        find: Callable[[int, int], Member | None],
    ) -> None:
        self._pulses = pulses
        self._hub = hub
        self._tell = tell
        self._find = find
        self._numbers = itertools.count(1)
        self._open: dict[int, _Case] = {}

    def begin(self, suspects: Sequence[Suspect], running: Sequence[Running] = ()) -> None:
        """Ask *suspects*; `Examined` is told when they have answered, or have had their time.

        The others of those *running*, which owe answers, are asked as witnesses.
        """
        known = {
            (each.rank, each.incarnation) for case in self._open.values() for each in case.suspects
        }
        batch = [each for each in suspects if (each.rank, each.incarnation) not in known]
        if not batch:
            return
        notice = Examined(next(self._numbers))
        accused = {each.rank for each in batch}
        witnesses = [each for each in running if each.rank not in accused]
        everyone = {each.rank: each.incarnation for each in witnesses}
        everyone |= {each.rank: each.incarnation for each in batch}
        asked = {
            rank: incarnation
            for rank, incarnation in everyone.items()
            if not self._is_stopped(rank, incarnation)
        }
        question = self._pulses.ask(asked)
        self._open[notice.number] = _Case(question, batch, witnesses)
        question.when_answered(lambda: self._tell(notice))
        self._hub.call_at(time.monotonic() + _PATIENCE, lambda: self._tell(notice))

    def end(self, notice: Examined) -> tuple[list[Finding], bool]:
        """Return who is to be ended, and whether others were let go: look at those again."""
        case = self._open.pop(notice.number, None)
        if case is None:
            return [], False  # it had been answered before its time was over
        signs = case.question.signs()
        case.question.close()
        found: list[Finding] = []
        waiting: list[Finding] = []
        let_go = False
        for suspect in case.suspects:
            member = self._find(suspect.rank, suspect.incarnation)
            if member is None or member.process is None:
                continue
            if not suspect.holds():
                let_go = True
                continue
            sign = signs.get(suspect.rank)
            finding = Finding(member, suspect.why, _describe(sign, member.process.pid))
            (waiting if suspect.in_call and _waits(sign) else found).append(finding)
        others_hang = bool(found)
        for witness in case.witnesses if waiting else ():
            sign = signs.get(witness.rank)
            member = self._find(witness.rank, witness.incarnation)
            if _waits(sign) or member is None or member.process is None:
                continue
            if witness.limit is not None:
                others_hang = True  # its own time will be over soon
            elif not witness.began and (sign is None or sign.pulse is None):
                others_hang = True
                why = "others wait for it in a call that it has not begun"
                found.append(Finding(member, why, _describe(sign, member.process.pid)))
        return (found, True) if others_hang and waiting else ([*found, *waiting], let_go)

    def _is_stopped(self, rank: int, incarnation: int) -> bool:
        member = self._find(rank, incarnation)
        return member is None or member.process is None or member.process.is_stopped()


@dataclass(frozen=True, slots=True)
class _Case:
    question: Question
    suspects: Sequence[Suspect]
    witnesses: Sequence[Running]


def _waits(sign: Sign | None) -> bool:
    """Whether a rank waits in a collective operation for the others."""
    return sign is not None and sign.pulse is not None and sign.pulse.is_in_collective


def _describe(sign: Sign | None, pid: int) -> str:
    """Return what a rank is doing, from its answer and from what the kernel shows."""
    if sign is None:
        return ""  # stopped, which is why it is suspected
    vitals = Vitals.of(pid)
    place = f" in {vitals.wait}" if vitals.wait else ""
    if sign.pulse is not None:
        return f"{'busy' if vitals.state == 'R' else 'waiting'} in {sign.pulse}"
    if vitals.state == "D":
        return f"wedged in uninterruptible sleep{place}"
    doing = "uses the processor" if vitals.state == "R" else f"sleeps{place}"
    silence = f"no sign of life within {sign.after:.2g} s"
    return f"wedged: {silence}, so native code holds the interpreter lock; it {doing}"


Doubt = Overdue | ReformOverdue | LeaveDue | Look | Examined | OutOfStep
"""What may speak against a rank."""

_LOOK_AGAIN = 0.5  # seconds for ranks that waited for one that hung to come free by its death


class Suspicion:
    """What speaks against the ranks of one group. Used by its actor's thread alone.

    Args:
        find: Returns the member, or spare, of that rank and incarnation.
        state: Returns what the group is just now.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        shared: Shared,
        members: Members,
        stopping: Stopping,
        hub: Hub,
        *,
        tell: Callable[[Notice], None],
        find: Callable[[int, int], Member | None],
        state: Callable[[], GroupState],
    ) -> None:
        self._spec = spec
        self._seating = shared.plane.seating
        self._watch = shared.watch
        self._members = members
        self._stopping = stopping
        self._find = find
        self._state = state
        self._examinations = Examinations(shared.pulses, hub, tell, find)
        self._leavings = Leavings(members, stopping, shared.pulses, hub, tell=tell, state=state)

    def hear(self, notice: Doubt) -> None:
        """Suspect, examine, or end whom *notice* speaks against."""
        match notice:
            case Overdue():
                self._overdue(notice)
            case ReformOverdue():
                self._reform_overdue(notice)
            case LeaveDue():
                self._leavings.hear(notice)
            case Look():
                self._look(notice)
            case Examined():
                self._conclude(notice)
            case OutOfStep(wire):
                self._out_of_step(wire)

    def watch_leaving(self, epoch: int) -> None:
        """Watch those that have just been told to leave their process group for *epoch*."""
        self._leavings.begin(epoch)

    def close(self) -> None:
        """Wait for no more answers."""
        self._leavings.close()

    def _out_of_step(self, wire: int) -> None:
        """End a rank of a group that cannot go on, so that the group is formed anew."""
        state = self._state()
        if state.keep and state.phase is not Phase.SERVING:
            return  # it is being formed anew
        discord = self._seating.out_of_step(wire)
        if discord is None:
            return
        member = self._members.find(discord.rank, discord.incarnation)
        if member is None or member.asked or member.hung or member.broken:
            return
        member.out_of_step = True
        if discord.is_stuck:
            self._stopping.examine(member, discord.why)
        else:
            member.broken = discord.why
            self._stopping.kill(member)

    def _overdue(self, notice: Overdue) -> None:
        """Suspect a rank that has had its time."""
        member = self._find(notice.rank, notice.incarnation)
        starting = notice.what == "start"
        if member is None or (starting and member.ready):
            return
        match notice.what:
            case "start":
                limit = self._spec.start_timeout
                why = f"its start took longer than start_timeout={limit:g} s"
            case "stream":
                why = "it closed its call socket and lived on"
            case "call":
                why = notice.detail
        suspect = Suspect(
            notice.rank, notice.incarnation, why, lambda: not (starting and member.ready)
        )
        self._examinations.begin([suspect])

    def _reform_overdue(self, notice: ReformOverdue) -> None:
        """Suspect, or end, a rank that could not be kept; what follows is decided by its exit."""
        member = self._members.find(notice.rank, notice.incarnation)
        if member is None:
            return

        def reforms() -> bool:
            mine = member.epoch == notice.epoch and not member.asked
            return mine and self._state().ranks[member.rank].state is RankState.REFORMING

        def lingers() -> bool:
            return reforms() and member.left < notice.epoch

        if not reforms():
            return
        match notice.what:
            case "leave":
                if lingers():
                    limit = self._spec.leave_within
                    why = f"it had not left the old process group within leave_within={limit:g} s"
                    suspect = Suspect(member.rank, member.incarnation, why, lingers)
                    self._examinations.begin([suspect])
            case "join":
                limit = self._spec.start_timeout
                why = f"on_reform took longer than start_timeout={limit:g} s"
                suspect = Suspect(member.rank, member.incarnation, why, reforms)
                self._examinations.begin([suspect])
            case "failed":
                if not self._state().mending:  # else a further epoch is on its way, for all
                    failure = member.failure
                    if failure is not None and not member.hung:
                        member.broken = f"it could not be re-formed: {failure.headline}"
                    self._stopping.kill(member)

    def _look(self, look: Look) -> None:
        """See whether a rank hangs, and suspect those that seem to."""

        def is_stopped(running: Running) -> bool:
            member = self._members.find(running.rank, running.incarnation)
            return member is not None and member.process is not None and member.process.is_stopped()

        running = self._seating.running()
        arriving = {each.rank: each for each in self._members.current() if self._arrives(each)}
        others = [Running(each.rank, each.incarnation) for each in arriving.values()]
        watched = [*(each for each in running if each.rank not in arriving), *others]
        judged = self._watch.judge(look, watched, is_stopped, time.monotonic())
        suspects: list[Suspect] = []
        for rank, why in judged:
            holds = partial(self._runs_on, rank)
            if member := arriving.get(rank.rank):
                holds = partial(self._arrives, member)
            if holds():
                in_call = member is None
                suspects.append(Suspect(rank.rank, rank.incarnation, why, holds, in_call=in_call))
        self._examinations.begin(suspects, running)

    def _conclude(self, notice: Examined) -> None:
        """End those that an examination has found to hang."""
        findings, look_again = self._examinations.end(notice)
        if look_again:
            self._watch.wake(_LOOK_AGAIN)
        for finding in findings:
            self._stopping.examine(finding.member, finding.why, finding.seen)

    def _arrives(self, member: Member) -> bool:
        """Whether *member* starts, or is to join another epoch: then it is waited for."""
        if member.process is None or member.asked:
            return False
        reforms = self._state().ranks[member.rank].state is RankState.REFORMING
        return reforms or not member.ready

    def _runs_on(self, rank: Running) -> bool:
        """Whether *rank* is still in the call it was found in, and is to be judged by it."""
        member = self._members.find(rank.rank, rank.incarnation)
        if member is None or member.asked:
            return False
        if self._state().ranks[rank.rank].state is RankState.REFORMING:
            return False  # it is to leave its process group, and has a limit for that
        now = (each for each in self._seating.running() if each.rank == rank.rank)
        return next((each.began for each in now), 0.0) == rank.began


_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process
_LOOKS = 4  # how often a rank is looked at in the time it may be stopped


class HangWatch:
    """The looks of one executor.

    Args:
        stopped_after: Seconds a rank may be stopped; None for ever.
    """

    def __init__(self, hub: Hub, stopped_after: float | None, tell: Callable[[Look], None]) -> None:
        self._hub = hub
        self._stopped_after = stopped_after
        self._tell = tell
        self._timer: Timer | None = None
        self._anew = 0.0  # when all limits began anew
        self._stopped: dict[tuple[int, int], float] = {}  # since when, as far as was seen

    def wake(self, limit: float | None) -> None:
        """Look in time: ranks owe answers, perhaps one that they have *limit* seconds for."""
        waits = [limit] if limit is not None else []
        if self._stopped_after is not None:
            waits.append(self._stopped_after / _LOOKS)
        if waits:
            self._look_at(time.monotonic() + min(waits))

    def judge(
        self,
        look: Look,
        running: Iterable[Running],
        is_stopped: Callable[[Running], bool],
        now: float,
    ) -> list[tuple[Running, str]]:
        """Return who hangs, and how; sees to the next look."""
        if now - look.due > _PAUSE:
            self._anew = now
            self._stopped.clear()
        hung: list[tuple[Running, str]] = []
        stopped: dict[tuple[int, int], float] = {}
        waits: list[float] = []
        limit = self._stopped_after
        for rank in running:
            if limit is not None:
                waits.append(now + limit / _LOOKS)
            if limit is not None and is_stopped(rank):
                key = rank.rank, rank.incarnation
                since = stopped[key] = self._stopped.get(key, now)
                if now - since >= limit:
                    hung.append((rank, f"stopped for {now - since:.1f} s"))
                    continue
                waits.append(since + limit)
            if rank.shortest is not None:
                waits.append(now + rank.shortest)
            if rank.limit is not None:
                began = max(rank.began, self._anew, now if rank.spoke else 0.0)
                if now - began >= rank.limit:
                    text = f"{rank.method} ran for {now - rank.began:.1f} s"
                    hung.append((rank, f"{text}, hang_after={rank.limit:g} s"))
                    continue
                waits.append(began + rank.limit)
        self._stopped = stopped
        if waits:
            self._look_at(min(waits))
        return hung

    def close(self) -> None:
        """Look no more."""
        if (timer := self._timer) is not None:
            timer.cancel()

    def _look_at(self, at: float) -> None:
        # No lock, for this is called under the plane's: a race causes a look too many at worst.
        if (timer := self._timer) is not None and timer.is_pending:
            if timer.at <= at:
                return
            timer.cancel()
        self._timer = self._hub.call_at(at, lambda: self._tell(Look(at)))
