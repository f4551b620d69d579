"""Health monitor: confirms by a heartbeat that a rank past its limit hangs, and has it ended.

- A suspect is asked for a heartbeat before it is ended; one that has gone on with other work by
  then is let go. A rank that does not reply is given half a second.
- If some suspects only wait in a collective operation for another rank, that rank alone is ended,
  once its own limit has passed: its death frees the others.
- A rank that was asked to stop has deadlines of its own and is never a suspect.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx.actors.calls.rank import Running
from phalanx.actors.group.messages import Examined, Look, OutOfStep, Overdue, ReformOverdue
from phalanx.runtime import Pulse, Vitals
from phalanx.supervision import Phase, RankState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.actors.group.handle import Group
    from phalanx.actors.group.members import Members
    from phalanx.actors.group.messages import Message
    from phalanx.actors.group.shutdown import Shutdown
    from phalanx.actors.group.worker import Worker
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import EventLoop
    from phalanx.supervision import GroupState

    from .heartbeat import HeartbeatRequest


_PATIENCE = 0.5  # seconds for a heartbeat, which takes milliseconds
_LOOK_AGAIN = 0.5  # seconds for ranks to come free by the death of the one they waited for

HealthNotice = Overdue | ReformOverdue | Look | Examined | OutOfStep
"""The messages of the group's actor that the monitor handles."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that may hang: *why*, whether that still *holds*, and if a call takes too long."""

    rank: int
    incarnation: int
    why: str
    holds: Callable[[], bool]
    in_call: bool = False


def find_hung(
    suspects: Sequence[Suspect],
    others: Sequence[Running],
    replies: Mapping[int, Pulse | None],
) -> dict[int, str]:
    """Return the ranks to end, each with why.

    Suspects that wait in a collective operation are not among them if any other rank is to end, or
    is in a call that has a limit and does not wait itself: that one holds up the rest.
    """

    def waits(rank: int) -> bool:
        pulse = replies.get(rank)
        return pulse is not None and pulse.is_in_collective

    waiting = {each.rank: each.why for each in suspects if each.in_call and waits(each.rank)}
    hung = {each.rank: each.why for each in suspects if each.rank not in waiting}
    late = False
    for other in others if waiting else ():
        if waits(other.rank):
            continue
        if other.limit is not None:
            late = True
        elif not other.began and replies.get(other.rank) is None:
            hung[other.rank] = "others wait for it in a call that it has not begun"
    return hung if hung or late else waiting


class HealthMonitor:
    """The suspects of one group. Used on its actor's thread alone.

    Args:
        find: Returns the member, or spare, of that rank and incarnation.
        state: Returns the group's present state.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        group: Group,
        members: Members,
        stopping: Shutdown,
        loop: EventLoop,
        *,
        tell: Callable[[Message], None],
        find: Callable[[int, int], Worker | None],
        state: Callable[[], GroupState],
    ) -> None:
        self._spec = spec
        self._plane = group.plane
        self._watchdog = group.watchdog
        self._heartbeats = group.heartbeats
        self._members = members
        self._stopping = stopping
        self._loop = loop
        self._tell = tell
        self._find = find
        self._state = state
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[HeartbeatRequest, list[Suspect], list[Running]]] = {}

    def handle(self, notice: HealthNotice) -> None:
        """Suspect, examine or end the rank that *notice* names."""
        match notice:
            case Overdue():
                self._overdue(notice)
            case ReformOverdue():
                self._reform_overdue(notice)
            case Look():
                self._check_limits(notice)
            case Examined(number):
                self._conclude(number)
            case OutOfStep(wire):
                self._out_of_step(wire)

    # --- suspects -----------------------------------------------------------------------

    def _check_limits(self, look: Look) -> None:
        """Suspect the ranks that are past their limits."""

        def is_stopped(running: Running) -> bool:
            return self._is_stopped(self._members.find(running.rank, running.incarnation))

        running = self._plane.running()
        arriving = {each.rank: each for each in self._members.current() if self._arrives(each)}
        watched = [each for each in running if each.rank not in arriving]
        watched += [Running(each.rank, each.incarnation) for each in arriving.values()]
        suspects: list[Suspect] = []
        for rank, why in self._watchdog.judge(look, watched, is_stopped, self._loop.time()):
            member = arriving.get(rank.rank)
            in_call = member is None
            holds = partial(self._arrives, member) if member else partial(self._runs_on, rank)
            if holds():
                suspects.append(Suspect(rank.rank, rank.incarnation, why, holds, in_call))
        self._examine(suspects, running)

    def _arrives(self, member: Worker) -> bool:
        """Whether *member* starts, or is about to join another epoch."""
        if member.process is None or member.asked:
            return False
        return not member.ready or self._is_reforming(member.rank)

    def _runs_on(self, rank: Running) -> bool:
        """Whether *rank* is still in the same call, and subject to its limit."""
        member = self._members.find(rank.rank, rank.incarnation)
        if member is None or member.asked or self._is_reforming(rank.rank):
            return False
        return any(
            each.rank == rank.rank and each.began == rank.began for each in self._plane.running()
        )

    def _overdue(self, notice: Overdue) -> None:
        member = self._find(notice.rank, notice.incarnation)
        starting = notice.what == "start"
        if member is None or (starting and member.ready):
            return
        match notice.what:
            case "start":
                why = f"its start took longer than limits.start={self._spec.limits.start:g} s"
            case "stream":
                why = "it closed its call socket and lived on"
            case "call":
                why = notice.detail

        def holds() -> bool:
            return not (starting and member.ready)

        self._examine([Suspect(notice.rank, notice.incarnation, why, holds)])

    def _reform_overdue(self, notice: ReformOverdue) -> None:
        """Free, suspect or end a survivor that has not joined the new epoch in time."""
        member = self._members.find(notice.rank, notice.incarnation)
        if member is None:
            return

        def reforms() -> bool:
            mine = member.epoch == notice.epoch and not member.asked
            return mine and self._is_reforming(member.rank)

        def lingers() -> bool:
            return reforms() and member.left < notice.epoch

        if not reforms():
            return
        match notice.what:
            case "part":
                if lingers():
                    self._heartbeats.part(member.rank, member.incarnation, notice.epoch)
            case "leave":
                if lingers():
                    limit = self._spec.policy.leave_within
                    why = f"it had not left the old process group within leave_within={limit:g} s"
                    self._examine([Suspect(member.rank, member.incarnation, why, lingers)])
            case "join":
                limit = self._spec.limits.start
                why = f"on_reform took longer than limits.start={limit:g} s"
                self._examine([Suspect(member.rank, member.incarnation, why, reforms)])
            case "failed":
                if not self._state().mending:  # else a further epoch of all ranks follows
                    failure = member.failure
                    if failure is not None and not member.hung:
                        member.broken = f"it could not be re-formed: {failure.headline}"
                    self._stopping.kill(member)

    def _out_of_step(self, wire: int) -> None:
        """End a rank of a group whose ranks are in different calls, so that it is formed anew."""
        state = self._state()
        if state.keep and state.phase is not Phase.SERVING:
            return  # it is being formed anew
        desync = self._plane.out_of_step(wire)
        if desync is None:
            return
        member = self._members.find(desync.rank, desync.incarnation)
        if member is None or member.asked or member.hung or member.broken:
            return
        member.out_of_step = True
        if desync.is_stuck:
            self._stopping.examine(member, desync.why)
        else:
            member.broken = desync.why
            self._stopping.kill(member)

    # --- examination --------------------------------------------------------------------

    def _examine(self, suspects: Sequence[Suspect], running: Sequence[Running] = ()) -> None:
        """Request heartbeats of *suspects* and of the others *running*; `Examined` follows."""
        known = {
            (each.rank, each.incarnation)
            for _, suspected, _ in self._open.values()
            for each in suspected
        }
        new = [each for each in suspects if (each.rank, each.incarnation) not in known]
        if not new:
            return
        ranks = {each.rank for each in new}
        others = [each for each in running if each.rank not in ranks]
        everyone: list[Suspect | Running] = [*others, *new]
        asked = {
            each.rank: each.incarnation
            for each in everyone
            if not self._is_stopped(self._find(each.rank, each.incarnation))
        }
        done = partial(self._tell, Examined(number := next(self._numbers)))
        self._open[number] = self._heartbeats.request(asked, done), new, others
        self._loop.call_at(self._loop.time() + _PATIENCE, done)

    def _conclude(self, number: int) -> None:
        """End the ranks that an examination has found to hang."""
        if number not in self._open:
            return  # all had replied before the time was over
        request, suspects, others = self._open.pop(number)
        replies = request.replies()
        request.close()
        members: dict[int, Worker] = {}
        everyone: list[Suspect | Running] = [*suspects, *others]
        for each in everyone:
            member = self._find(each.rank, each.incarnation)
            if member is not None and member.process is not None:
                members[each.rank] = member
        there = [each for each in suspects if each.rank in members]
        holding = [each for each in there if each.holds()]
        here = [each for each in others if each.rank in members]
        hung = find_hung(holding, here, replies)
        if any(each.rank not in hung for each in there):
            self._watchdog.wake(_LOOK_AGAIN)
        for rank, why in hung.items():
            process = members[rank].process
            assert process is not None
            # A stopped rank, which is not asked, is suspected for that.
            seen = _describe(replies[rank], process.pid) if rank in replies else ""
            self._stopping.examine(members[rank], why, seen)

    def _is_reforming(self, rank: int) -> bool:
        return self._state().ranks[rank].state is RankState.REFORMING

    def _is_stopped(self, member: Worker | None) -> bool:
        return member is not None and member.process is not None and member.process.is_stopped()


def _describe(pulse: Pulse | None, pid: int) -> str:
    """Return what a rank is doing, from its heartbeat and its state in /proc."""
    vitals = Vitals.of(pid)
    place = f" in {vitals.wait}" if vitals.wait else ""
    if pulse is not None:
        return f"{'busy' if vitals.state == 'R' else 'waiting'} in {pulse}"
    if vitals.state == "D":
        return f"wedged in uninterruptible sleep{place}"
    doing = "uses the processor" if vitals.state == "R" else f"sleeps{place}"
    silence = f"no sign of life within {_PATIENCE:g} s"
    return f"wedged: {silence}, so native code holds the interpreter lock; it {doing}"
