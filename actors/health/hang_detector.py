"""Hang detector: finds ranks past their limits, confirms by a heartbeat that one hangs, ends it.

- A suspect is sent a heartbeat request before it is ended; one that has begun other work by
  then is spared. A rank that does not reply is given half a second.
- If some suspects only wait in a collective operation for another rank, that rank alone is ended,
  once its own limit has passed: its death releases the others.
- A rank that was asked to stop has separate deadlines and is never a suspect.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx.actors.calls.rank import Progress
from phalanx.runtime import Pulse, Vitals
from phalanx.supervision import Phase, RankState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from phalanx.actors.group.handle import Group
    from phalanx.actors.group.membership import Membership
    from phalanx.actors.group.shutdown import Shutdown
    from phalanx.actors.group.worker import Worker
    from phalanx.runtime import EventLoop, Timer
    from phalanx.supervision import GroupState

    from .heartbeat import HeartbeatRequest


_HEARTBEAT_TIMEOUT = 0.5  # seconds for a heartbeat, which takes milliseconds
_LOOK_AGAIN = 0.5  # seconds for ranks to come free by the death of the one they waited for
_EXIT_LIMIT = 1.0  # seconds a process may live on after its call socket, or its last words
_NODE_EXIT_LIMIT = 12.0  # the same on a node, which first ends what the process has left behind
_SETTLE = 0.25  # seconds for messages between survivors that are under way
_EXPLANATION_LIMIT = 0.5  # seconds for a death to become known that made a kept rank's joining fail
_PAUSE = 1.0  # seconds by which a check is late that count as a pause of this process
_CHECKS = 4  # checks of a rank in the time that it may be stopped


class HangLimits:
    """When to check for hung ranks, and which ranks are past their limits.

    - A timer runs while ranks owe replies, start or are re-formed; none runs at rest.
    - A rank's time counts from when it began its call, as its progress page shows, not from the
      send. Without a limit only a rank in state T (stopped, not traced) counts as hung.
    - After a pause of the driver (SIGSTOP, suspend) pending messages are read first, and all limits
      begin anew.

    Args:
        stopped_after: Seconds a rank may be stopped; None for no limit.
        on_due: Called when a check is due, with the time for which it was scheduled.
    """

    def __init__(
        self, loop: EventLoop, stopped_after: float | None, on_due: Callable[[float], None]
    ) -> None:
        self._loop = loop
        self._stopped_after = stopped_after
        self._on_due = on_due
        self._timer: Timer | None = None
        self._resumed = 0.0  # when this process was last seen to go on after a pause
        self._stopped: dict[tuple[int, int], float] = {}  # (rank, incarnation): first seen so

    def wake(self, limit: float | None) -> None:
        """Schedule a check in time for a call limited to *limit* seconds; None for no limit."""
        delays = [limit] if limit is not None else []
        if self._stopped_after is not None:
            delays.append(self._stopped_after / _CHECKS)
        if delays:
            self._schedule(self._loop.time() + min(delays))

    def judge(
        self,
        due: float,
        running: Iterable[Progress],
        is_stopped: Callable[[Progress], bool],
        now: float,
    ) -> list[tuple[Progress, str]]:
        """Return the ranks past their limits, each with why; schedule the next check.

        *due* is when this one was to be.
        """
        if now - due > _PAUSE:
            self._resumed = now
            self._stopped.clear()
        hung: list[tuple[Progress, str]] = []
        stopped: dict[tuple[int, int], float] = {}
        checks: list[float] = []
        for rank in running:
            if (limit := self._stopped_after) is not None:
                checks.append(now + limit / _CHECKS)
                if is_stopped(rank):
                    key = rank.rank, rank.incarnation
                    since = stopped[key] = self._stopped.get(key, now)
                    if now - since >= limit:
                        hung.append((rank, f"stopped for {now - since:.1f} s"))
                        continue
                    checks.append(since + limit)
            if rank.shortest is not None:
                checks.append(now + rank.shortest)
            if rank.limit is not None:
                began = max(rank.began, self._resumed, now if rank.spoke else 0.0)
                if now - began >= rank.limit:
                    text = f"{rank.method} ran for {now - rank.began:.1f} s"
                    hung.append((rank, f"{text}, hang_after={rank.limit:g} s"))
                    continue
                checks.append(began + rank.limit)
        self._stopped = stopped
        if checks:
            self._schedule(min(checks))
        return hung

    def close(self) -> None:
        """Stop the timer."""
        if (timer := self._timer) is not None:
            timer.cancel()

    def _schedule(self, at: float) -> None:
        # Without a lock, for callers hold the plane's: a race causes one check too many at worst.
        if (timer := self._timer) is not None and timer.is_pending:
            if timer.at <= at:
                return
            timer.cancel()
        self._timer = self._loop.call_at(at, lambda: self._on_due(at))


@dataclass(frozen=True, slots=True)
class Suspect:
    """A worker that may hang: *why*, whether that still *holds*, and if a call takes too long."""

    worker: Worker
    why: str
    holds: Callable[[], bool]
    in_call: bool = False


@dataclass(frozen=True, slots=True)
class _Examination:
    """One request for heartbeats: the suspects, other running ranks, and vitals from before it."""

    request: HeartbeatRequest
    suspects: Sequence[Suspect]
    others: list[Progress]
    before: dict[Worker, Vitals]


def find_hung(
    suspects: Sequence[Suspect],
    others: Sequence[Progress],
    replies: Mapping[int, Pulse | None],
) -> dict[int, str]:
    """Return the ranks to end, each with why.

    Suspects that wait in a collective operation are not among them if any other rank is to end, or
    is in a call that has a limit and does not wait itself: the others wait for that one.
    """

    def waits(rank: int) -> bool:
        pulse = replies.get(rank)
        return pulse is not None and pulse.is_in_collective

    hung = {each.worker.rank: each.why for each in suspects}
    waiting = {
        each.worker.rank: hung.pop(each.worker.rank)
        for each in suspects
        if each.in_call and waits(each.worker.rank)
    }
    late = False
    for other in others if waiting else ():
        if waits(other.rank):
            continue
        if other.limit is not None:
            late = True
        elif not other.began and replies.get(other.rank) is None:
            hung[other.rank] = "others wait for it in a call that it has not begun"
    return hung if hung or late else waiting


class HangDetector:
    """The suspects of *group*. Used on its actor's thread alone, but for `vitals`.

    Args:
        state: Returns the group's present state.
    """

    def __init__(
        self,
        group: Group,
        membership: Membership,
        shutdown: Shutdown,
        state: Callable[[], GroupState],
    ) -> None:
        self._group = group
        self._spec = group.spec
        self._plane = group.plane
        self._limits = group.hang_limits
        self._membership = membership
        self._shutdown = shutdown
        self._state = state
        self._numbers = itertools.count(1)
        self._open: dict[int, _Examination] = {}

    def vitals(self, rank: int, incarnation: int) -> Vitals:
        """Return those of that incarnation; of a process that is gone if there is none now."""
        worker = self._membership.find(rank, incarnation)
        return Vitals() if worker is None else _vitals(worker)

    # --- limits of starts, ends and re-forms --------------------------------------------

    def limit_start(self, worker: Worker) -> None:
        """Suspect *worker* if it does not become ready in time."""
        limit, began = self._spec.limits.start, worker.started_at
        why = f"its start took longer than limits.start={limit:g} s"

        def holds() -> bool:  # a spare may have taken a rank by then, which is another start
            return not worker.ready and worker.started_at == began

        self._suspect_after(limit, Suspect(worker, why, holds))
        self._limits.wake(None)

    def expect_exit(self, worker: Worker) -> None:
        """Suspect *worker*, which has said or shown that it ends, if it lives on."""
        failure = worker.failure
        why = "it closed its call socket" if failure is None else f"it raised {failure.headline}"
        why += " and lived on"
        limit = _EXIT_LIMIT if worker.node is None else _NODE_EXIT_LIMIT
        self._suspect_after(limit, Suspect(worker, why, lambda: True))

    def limit_reform(self, worker: Worker) -> None:
        """Suspect *worker* if it does not note that its process group is void, or join another."""
        epoch = worker.epoch
        leave, join = self._spec.policy.leave_within, self._spec.limits.start
        why = f"it had not noted within leave_within={leave:g} s that its process group is void"
        self._suspect_after(leave, Suspect(worker, why, partial(self._heeds_not, worker, epoch)))
        why = f"on_reform took longer than limits.start={join:g} s"
        self._suspect_after(join, Suspect(worker, why, partial(self._reforms, worker, epoch)))
        self._limits.wake(None)

    def limit_leave(self, worker: Worker) -> None:
        """Suspect *worker* if it does not leave its process group in time, as it was told.

        The connections of the group end under it before, unless it leaves soon.
        """
        epoch, leave = worker.epoch, self._spec.policy.leave_within

        def due() -> None:
            if self._lingers(worker, epoch):
                self._group.heartbeats.part(worker.rank, worker.incarnation, epoch)

        self._shutdown.after(worker, min(leave / 2, _SETTLE), due)
        why = f"it had not left the old process group within leave_within={leave:g} s"
        self._suspect_after(leave, Suspect(worker, why, partial(self._lingers, worker, epoch)))

    def suspect_reform(self, worker: Worker) -> None:
        """End *worker*, which could not join, unless another death is the cause."""
        epoch = worker.epoch

        def failed() -> None:
            # While ranks are to be mended a further epoch of all ranks follows.
            if self._reforms(worker, epoch) and not self._state().mending:
                if worker.failure is not None and not worker.hung:
                    worker.broken = f"it could not be re-formed: {worker.failure.headline}"
                self._shutdown.kill(worker)

        self._shutdown.after(worker, _EXPLANATION_LIMIT, failed)

    def _suspect_after(self, seconds: float, suspect: Suspect) -> None:
        def due() -> None:
            if suspect.holds():
                self._examine([suspect])

        self._shutdown.after(suspect.worker, seconds, due)

    def _heeds_not(self, worker: Worker, epoch: int) -> bool:
        # One that has noted it keeps its order until the others have.
        is_late = worker.order is not None and worker.voided != worker.epoch
        return is_late and self._reforms(worker, epoch)

    def _lingers(self, worker: Worker, epoch: int) -> bool:
        return self._reforms(worker, epoch) and worker.left < epoch

    def _reforms(self, worker: Worker, epoch: int) -> bool:
        mine = worker.epoch == epoch and not worker.asked
        return mine and self._is_reforming(worker.rank)

    def _is_reforming(self, rank: int) -> bool:
        return self._state().ranks[rank].state is RankState.REFORMING

    # --- limits of calls ----------------------------------------------------------------

    def check_limits(self, due: float) -> None:
        """Suspect the ranks that are past their limits; the check was *due* then."""

        def is_stopped(running: Progress) -> bool:
            return _is_stopped(self._membership.find(running.rank, running.incarnation))

        running = self._plane.running()
        current = {each.rank: each for each in self._membership.current()}
        arriving = {rank: each for rank, each in current.items() if self._arrives(each)}
        watched = [each for each in running if each.rank not in arriving]
        watched += [Progress(each.rank, each.incarnation) for each in arriving.values()]
        known = [each.worker for one in self._open.values() for each in one.suspects]
        suspects: list[Suspect] = []
        now = self._group.clock()
        for rank, why in self._limits.judge(due, watched, is_stopped, now):
            worker = self._membership.find(rank.rank, rank.incarnation)
            if worker is None or worker in known:
                continue
            holds = partial(self._arrives, worker)
            if in_call := rank.rank not in arriving:
                holds = partial(self._runs_on, worker, rank)
            if holds():
                suspects.append(Suspect(worker, why, holds, in_call))
        self._examine(suspects, running)

    def overdue(self, rank: int, incarnation: int, wire: int, why: str) -> None:
        """Suspect that incarnation, which has had its time for the call *wire*."""
        if (worker := self._membership.find(rank, incarnation)) is not None:
            self._examine([Suspect(worker, why, partial(self._owes, worker, wire))])

    def out_of_step(self, wire: int) -> None:
        """End a rank of a group that is to be formed anew.

        Some of its ranks have left the call *wire* by an exception, others have not, or the process
        group itself is broken. Called again until something is done about it.
        """
        state = self._state()
        if state.keep and state.phase is not Phase.SERVING:
            return  # it is being formed anew
        desync = self._plane.out_of_step(wire)
        if desync is None:
            return
        worker = self._membership.find(desync.rank, desync.incarnation)
        if worker is None or worker.asked or worker.hung or worker.broken:
            return
        worker.out_of_step = True
        if desync.is_stuck:
            self._shutdown.examine(worker, desync.why)
        else:
            worker.broken = desync.why
            self._shutdown.kill(worker)

    def _arrives(self, worker: Worker) -> bool:
        """Whether *worker* starts, or is about to join another epoch."""
        if worker.process is None or worker.asked:
            return False
        return not worker.ready or self._is_reforming(worker.rank)

    def _owes(self, worker: Worker, wire: int) -> bool:
        """Whether *worker* has yet to answer the call *wire*, and is subject to its limit."""
        if worker.asked or self._is_reforming(worker.rank):
            return False
        return self._plane.owes(worker.rank, worker.incarnation, wire)

    def _runs_on(self, worker: Worker, rank: Progress) -> bool:
        """Whether *worker* is still in the same call, and subject to its limit."""
        if worker.asked or self._is_reforming(rank.rank):
            return False
        return any(
            each.rank == rank.rank and each.began == rank.began for each in self._plane.running()
        )

    # --- examination --------------------------------------------------------------------

    def _examine(self, suspects: Sequence[Suspect], running: Sequence[Progress] = ()) -> None:
        """Request heartbeats of *suspects* and of the others *running*; `_conclude` follows."""
        if not suspects:
            return
        workers = {each.worker.rank: each.worker for each in suspects}
        others = [each for each in running if each.rank not in workers]
        for each in others:
            if (worker := self._membership.find(each.rank, each.incarnation)) is not None:
                workers[each.rank] = worker
        asked = {rank: each.incarnation for rank, each in workers.items() if not _is_stopped(each)}
        before = {each: _vitals(each) for each in workers.values()}
        number = next(self._numbers)
        done = partial(self._group.post, self._conclude, number)
        request = self._group.heartbeats.request(asked, done)
        self._open[number] = _Examination(request, suspects, others, before)
        self._group.runtime.loop.call_at(self._group.clock() + _HEARTBEAT_TIMEOUT, done)

    def _conclude(self, number: int) -> None:
        """End the ranks that an examination has found to hang."""
        if number not in self._open:
            return  # all had replied before the time was over
        one = self._open.pop(number)
        replies = dict(one.request.replies)
        one.request.close()
        there = [each for each in one.suspects if not each.worker.released and each.worker.process]
        workers = {each.worker.rank: each.worker for each in there}
        here: list[Progress] = []
        for each in one.others:
            worker = self._membership.find(each.rank, each.incarnation)
            if worker is not None and worker.process is not None:
                workers[each.rank] = worker
                here.append(each)
        hung = find_hung([each for each in there if each.holds()], here, replies)
        if any(each.worker.rank not in hung for each in there):
            self._limits.wake(_LOOK_AGAIN)
        for rank, why in hung.items():
            worker = workers[rank]
            # A stopped rank, which gets no request, is suspected for that.
            seen = ""
            if rank in replies:
                seen = _describe(replies[rank], one.before[worker], _vitals(worker))
            self._shutdown.examine(worker, why, seen)


def _is_stopped(worker: Worker | None) -> bool:
    return worker is not None and worker.process is not None and worker.process.is_stopped()


def _vitals(worker: Worker) -> Vitals:
    return Vitals() if worker.process is None else worker.process.vitals()


def _describe(pulse: Pulse | None, before: Vitals, vitals: Vitals) -> str:
    """Return what a rank is doing, from its heartbeat and its state in /proc.

    A thread that runs Python code sleeps for moments, until it has the interpreter lock again.
    """
    place = f" in {vitals.wait}" if vitals.wait else ""
    if pulse is not None:
        is_busy = vitals.state == "R" or vitals.ran > before.ran > 0
        return f"{'busy' if is_busy else 'waiting'} in {pulse}"
    if vitals.state == "D":
        return f"wedged in uninterruptible sleep{place}"
    doing = "uses the processor" if vitals.state == "R" else f"sleeps{place}"
    silence = f"no sign of life within {_HEARTBEAT_TIMEOUT:g} s"
    return f"wedged: {silence}, so native code holds the interpreter lock; it {doing}"
