"""`CallPlane`: the calls of one rank group, under one lock.

- Every accepted call is settled exactly once, whatever dies; everything later is void.
- All ranks get the collective calls in one order. A call takes a slot on every rank before its
  first byte is sent.
- An answer is matched by the number of the sending it belongs to, and by the incarnation it comes
  from; anything else is dropped and counted.
- What a dead rank wrote is read to its end before its calls are judged.
- The thread that reads runs no code of others: answers are kept as bytes, callbacks run elsewhere.

`recovery` decides what a death costs each call. Two parts keep a state of their own under the same
lock: `Sender` (numbers, batches) and `DesyncMonitor` (ranks out of step).
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Final

from phalanx.actors.signals.interrupts import uninterrupted
from phalanx.actors.spec.results import Outcome, OutcomeKind
from phalanx.runtime import (
    ARENA_IDLE,
    Arena,
    Arrival,
    Flag,
    Frame,
    Kind,
    OwnedLock,
    Payload,
    called_from_inside,
    occupied,
)
from phalanx.supervision import RuntimeFault, StreamNotTaken

from .call import Shape
from .desync import DesyncMonitor
from .queue import CallQueue
from .rank import Progress, RankSlot, RankTable, Running
from .reader import Reader, Ticket, spin_time
from .recovery import assess
from .sender import Sender
from .streams import GIVEN_UP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from phalanx.runtime import CallFate, Channel, CrashReport, Encoded

    from .call import Call
    from .desync import Desync
    from .reader import EventLoop, Events, Poller, Timer
    from .sender import Snapshots
    from .streams import StreamInbox

_PAUSE = 1.0  # seconds that a timer may be late before it counts as a pause of this process


class CallPlane:
    """The calls of one rank group.

    Args:
        loop: Timers, and reads while no caller does.
        depth: Calls that one rank may have been sent and not answered; also how many calls may
            be queued before `submit` blocks.
        snapshots: The checkpoint coordinator; None if ranks store no state.
        spins: Whether callers and ranks may poll for a moment before blocking (`spin_time`).
        on_end: Called with (rank, incarnation) when a rank's channel ends, if an exception is
            thrown in meanwhile more than once; under the lock.
        on_foreign: Called with the rank whose channel brought a packet that is no message, once
            for each incarnation; under the lock.
        on_busy: Called when ranks owe answers again, and for each call with a limit, which it gets.
            Under the lock, on a caller's thread: it must be quick.
        on_untaken: Called with each stream that was closed because its items were not taken.
        on_desync: Called with the number of a sending after which the ranks are out of step, again
            and again until `out_of_step` is; under the lock.
        inner: Each returns whether this thread has a lock that is taken under the plane's.
        poller: The readiness of channels; None for epoll(7).
        clock: The clock of *loop* and of deadlines.

    Attributes:
        pid: The driver's; a forked child has another.
        holds: How many reasons there are to send no new call: pauses, and ranks out of step.
        wait: Returns True once a call or ticket is done, False at a deadline; see `Reader.wait`.
    """

    def __init__(
        self,
        loop: EventLoop,
        size: int,
        *,
        depth: int = 64,
        snapshots: Snapshots | None = None,
        spins: bool = False,
        on_end: Callable[[int, int], None],
        on_foreign: Callable[[int], None] = lambda _: None,
        on_busy: Callable[[float | None], None] = lambda _limit: None,
        on_untaken: Callable[[Call], None] = lambda _: None,
        on_desync: Callable[[int], None] = lambda _wire: None,
        inner: tuple[Callable[[], bool], ...] = (),
        poller: Poller | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loop = loop
        self.clock = clock
        self.pid = os.getpid()
        self.arena = Arena.create()
        locked = () if snapshots is None else (snapshots.is_locked,)
        self.lock = OwnedLock(*inner, loop.is_inside, *locked)
        self._snapshots = snapshots
        self._spins = spins
        self._on_end = on_end
        self._on_foreign = on_foreign
        self._on_untaken = on_untaken
        self._queue = CallQueue(size, depth)
        self._table = table = RankTable(size)
        self._reader = Reader(
            loop,
            self.lock,
            table,
            on_ready=self._on_ready,
            on_nudge=self._on_nudge,
            poller=poller,
            clock=clock,
        )
        self.wait = self._reader.wait
        self._sender = Sender(
            table, self._reader, snapshots=snapshots, on_refused=self._refused, on_busy=on_busy
        )
        self._desyncs = DesyncMonitor(self, table, self._sender, on_desync)
        self._trimmer: Timer | None = None
        self._is_open = False  # whether every rank is attached, under one epoch
        self._dropped = 0  # void answers and foreign packets
        self._abandoned: deque[Call] = deque()  # streams whose consumer was collected
        self._pauses: dict[int, bool] = {}  # by thread: whether dispatch is held for it
        self._idle: list[Ticket] = []  # done once no rank owes an answer
        # What an exception that was thrown in has interrupted, until it is done again: an answer,
        # taken off its rank's list, and calls that are being settled, the latest first.
        self._taking: tuple[RankSlot, Call | None, Frame] | None = None
        self._settling: tuple[Call, Any] | None = None
        self.holds = 0
        _register(self.lock)

    def close(self) -> None:
        """Close the channels and give everything back; after `end`."""
        with self.lock.asked():
            for slot in self._table:
                slot.channel.close()
            self._table.clear()
            self._table.owed = 0
            self._notify_idle()
            if self._trimmer is not None:
                self._trimmer.cancel()
        self.arena.close()
        self._reader.close()
        _register(self.lock, gone=True)

    # --- callers: before a call -----------------------------------------------------------

    @uninterrupted
    def pack(self, encoded: Encoded) -> Payload:
        """Return *encoded* as it travels to this group's ranks; large buffers are copied now.

        Raises:
            MessageTooLarge: there is not enough memory.
        """
        return Payload.of(encoded, self.arena)

    def check_may_enter(self, what: str, *, waits: bool) -> None:
        """Raise `WouldDeadlock` if *what* interrupts the plane's own code on this thread.

        A call that *waits* may not interrupt what other threads wait for, either.
        """
        if self.is_inside(waits=waits):
            raise called_from_inside(what)

    def is_inside(self, *, waits: bool) -> bool:
        """Whether `check_may_enter` would raise."""
        if self.lock.is_inside():
            return True
        if len(_locks) > 1 and any(is_mine() for is_mine in _locks):
            return True  # another group's: its lock and this one, taken in both orders
        return waits and (
            self._reader.is_mine()
            or self.arena.is_held()
            or occupied.is_mine()
            or threading.get_ident() in self._pauses
        )

    @uninterrupted
    def check_open(self) -> None:
        """Raise the error of new calls, if they are refused."""
        with self.lock.asked():
            if self._queue.closed is not None:
                raise self._queue.closed()

    @uninterrupted
    def has_room(self) -> bool:
        """Whether `submit` would accept a call without blocking."""
        with self.lock.asked():
            return self._queue.closed is not None or not self._queue.is_full

    @uninterrupted
    def room(self, wake: Callable[[], None]) -> Ticket | None:
        """Return None if `submit` would accept a call without blocking; else *wake* is called then.

        It runs on the thread that makes room, under the lock.
        """
        with self.lock.asked():
            if self._queue.closed is not None or not self._queue.is_full:
                return None
            return self._queue.block(wake)

    # --- callers: one call ----------------------------------------------------------------

    def submit(self, call: Call, *, waits: bool, at_once: bool = False) -> None:
        """Accept *call*: send it, or queue it.

        If the caller *waits* for the call itself, or with *at_once*, it is queued however many are;
        else this blocks, up to the call's deadline, while the queue is full.

        Raises:
            ExecutorClosed: nothing is accepted any more.
            SpecError: it was made for another size, or for a rank that has been removed.
            CallTimeout: no place became free; nothing was sent.
        """
        if call.tap is not None:
            call.tap.issued(call)
        while (place := self._accept(call, waits or at_once, waits)) is not None:
            admitted = False
            try:
                self.check_may_enter(call.name, waits=True)
                admitted = self._reader.wait(place, call.options.deadline)
            finally:
                if not admitted:
                    with self.lock.asked():
                        self._queue.unblock(place)
                    call.drop()
            if not admitted:
                raise call.timed_out()

    @uninterrupted
    def _accept(self, call: Call, beyond: bool, waits: bool) -> Ticket | None:
        """Send or queue *call* and return None; or return a ticket for a place in the queue."""
        queue = self._queue
        with self.lock.unasked:
            closed = queue.closed
            size = queue.size
            if closed is None and call.fits(size):
                if not beyond and queue.is_full:
                    return queue.block()
                if self.arena.is_warm and self._trimmer is None:
                    self._trim_later(ARENA_IDLE)
                queue.add(call)
                self.pump()
                if not waits:
                    self._reader.ensure()
                return None
        call.drop()
        if closed is not None:
            raise closed()
        raise call.misfit(size)

    def _trim_later(self, wait: float) -> None:
        """Return the arena's idle memory to the system in *wait* seconds."""
        if self._trimmer is None and self.arena.fd >= 0:
            self._trimmer = self.loop.call_at(self.clock() + wait, self._trim)

    def _trim(self) -> None:
        # Not under the plane's lock: a thread inside the arena may have to call the plane.
        wait = self.arena.trim_if_idle(self.clock())
        with self.lock.asked():
            self._trimmer = None
            if wait is not None:
                self._trim_later(wait)

    @uninterrupted
    def insert(self, call: Call, *, first: bool = False) -> None:
        """Accept *call*, however many are queued; before them if it is to be *first*.

        Raises:
            ExecutorClosed: nothing is accepted any more.
        """
        with self.lock.asked():
            closed = self._queue.closed
            if closed is None:
                if first:
                    self._queue.everyone.appendleft(call)
                else:
                    self._queue.add(call)
                self.pump()
                self._reader.ensure()
                return
        call.drop()
        raise closed()

    @uninterrupted
    def expire(self, call: Call) -> dict[int, int]:
        """Settle *call* as timed out unless it is done.

        Returns the ranks that have not answered it (rank: incarnation).
        """
        with self.lock.asked():
            if call.done:
                return {}
            late = {
                slot.rank: slot.incarnation
                for slot in self._table
                if slot.sent.get(call.wire) is call
            }
            if call.shape is Shape.GATHER and call.wire:
                for rank in call.missing:
                    error = call.timed_out()
                    call.answers[rank] = Outcome(rank, OutcomeKind.TIMEOUT, error=error)
                self.withdraw(call)
            else:
                self.withdraw(call, None if call.failed is not None else call.timed_out())
            self.pump()
            return late

    @uninterrupted
    def abandon(self, call: Call, cause: BaseException | None = None) -> bool:
        """Withdraw *call*, or void its answers if it has been sent; False if it is done.

        *cause* is what its caller gets in place of the outcome.
        """
        if call.tap is not None and cause is not None:
            call.tap.raised(cause)
        with self.lock.asked():
            if call.done:
                return False
            self.withdraw(call, CancelledError())
            self.pump()
            return True

    @uninterrupted
    def cancel(self, call: Call) -> bool:
        """Withdraw *call* if it has not been sent; return whether it was."""
        with self.lock.asked():
            if call.done or call.wire:
                return False
            self.withdraw(call, CancelledError())
            self.pump()
            return True

    @uninterrupted
    def when_settled(self, call: Call, then: Callable[[Call], None]) -> None:
        """Run ``then(call)`` when *call* is done, on the thread that settles it: be quick."""
        with self.lock.asked():
            if not call.done:
                self._watch(call, then)
                self._reader.ensure()
                return
        then(call)

    @uninterrupted
    def counts(self) -> dict[str, int]:
        """Return how many calls are in flight and queued, and how many answers were void."""
        with self.lock.asked():
            sent = {id(call) for call in self._unsettled() if call.wire}
            return {
                "in_flight": len(sent),
                "waiting": len(self._queue),
                "dropped_replies": self._dropped,
            }

    @uninterrupted
    def progress_by_rank(self) -> dict[int, Progress]:
        """Return what each rank is doing, as far as it is known without reading."""
        with self.lock.asked():
            return {slot.rank: slot.progress(self.clock()) for slot in self._table}

    # --- callers: streams -----------------------------------------------------------------

    @uninterrupted
    def take(
        self, call: Call, wake: Callable[[], None] | None = None
    ) -> tuple[int, Frame] | Ticket | None:
        """Return the next item of *call*'s stream and its rank, or None after the last.

        If none is there yet, returns a ticket that is done when there is news; or *wake* is called
        then, on the thread that reads it.
        """
        inbox = call.stream
        assert inbox is not None
        with self.lock.asked():
            if inbox.items:
                rank, frame = inbox.items.popleft()
                inbox.since = self.clock()
                more = inbox.grant(rank)
                slot = self._table.at(rank)
                if more is not None and slot is not None and slot.sent.get(call.wire) is call:
                    self._sender.say(slot, Kind.MORE, call.wire, more)
                return rank, frame
            if call.done:
                return None
            inbox.ticket = Ticket()
            self._set_waker(inbox, wake)
            self._reader.ensure()
            return inbox.ticket

    @uninterrupted
    def abandon_stream(self, call: Call) -> None:
        """End *call*'s stream and drop its items."""
        self.abandon(call)
        with self.lock.asked():
            assert call.stream is not None
            call.stream.items.clear()

    def abandon_later(self, call: Call) -> None:
        """End *call*'s stream soon; takes no lock, so a finalizer may call it anywhere."""
        self._abandoned.append(call)
        self._reader.nudge()

    @uninterrupted
    def _on_nudge(self) -> None:
        if self._abandoned:
            with self.lock.asked():
                while self._abandoned:
                    self.withdraw(self._abandoned.popleft(), CancelledError(GIVEN_UP))
                self.pump()

    def _keep_item(self, call: Call, rank: int, frame: Frame) -> None:
        """Keep an item of *call* for its consumer."""
        inbox = call.stream
        if inbox is None:
            frame.drop()  # no worker of ours sends one here
            return
        if not inbox.items:
            inbox.since = self.clock()
        inbox.items.append((rank, frame))
        if inbox.timer is None and inbox.ticket is None:
            self._check_taken_later(call, inbox)
        self._notify_consumer(inbox)

    def _end_stream(self, call: Call, inbox: StreamInbox) -> None:
        """Close the generators of *call*, which is settled, and notify its consumer."""
        begun = inbox.granted if len(call.asked) > 1 else 0
        for slot in self._table:
            if not slot.ended and slot.sent.get(call.wire) is call:
                self._sender.say(slot, Kind.CLOSE, call.wire, begun)
        if inbox.timer is not None:
            inbox.timer.cancel()
        self._notify_consumer(inbox)

    def _notify_consumer(self, inbox: StreamInbox) -> None:
        ticket, inbox.ticket = inbox.ticket, None
        wake = inbox.wake
        self._set_waker(inbox, None)
        if ticket is not None:
            ticket.done = True
            self._reader.notify(ticket)
        if wake is not None:
            wake()

    def _set_waker(self, inbox: StreamInbox, wake: Callable[[], None] | None) -> None:
        self._reader.watched += (wake is not None) - (inbox.wake is not None)
        inbox.wake = wake

    def _check_taken_later(self, call: Call, inbox: StreamInbox) -> None:
        if inbox.take_within < math.inf:
            due = inbox.since + inbox.take_within
            inbox.timer = self.loop.call_at(due, lambda: self._check_taken(call, inbox))

    def _check_taken(self, call: Call, inbox: StreamInbox) -> None:
        """Close *call*'s stream if its items have not been taken in time."""
        with self.lock.asked():
            if call.done or inbox.timer is None:
                return
            now = self.clock()
            if now - inbox.timer.at > _PAUSE:
                inbox.since = now  # its consumer was paused like this thread
            inbox.timer = None
            if not inbox.items:
                return
            if now - inbox.since < inbox.take_within:
                self._check_taken_later(call, inbox)
                return
            msg = (
                f"no item of the stream of {call.name} was taken for {inbox.take_within:g} s; it "
                "kept its ranks from serving, and was closed: close streams (`with`), or set "
                "take_within"
            )
            self.withdraw(call, StreamNotTaken(msg))
            self.pump()
        self._on_untaken(call)

    # --- callers: pauses ------------------------------------------------------------------

    @property
    def pauses(self) -> int:
        """How many threads pause dispatch."""
        return sum(self._pauses.values())

    def pause(self, deadline: float | None, *, every_call: bool = False) -> bool:
        """Queue new calls from now on; return True once no call is in flight, False at *deadline*.

        With *every_call* new calls are sent until all that were made before have ended, queued ones
        included. However it ends, `resume` must follow on the same thread, in a ``finally``; or
        `stay_paused`, if it was True. Between the two this thread may not wait for a call.
        """
        me = threading.get_ident()
        self._pauses[me] = False
        if every_call:
            made: set[Call] = set()
            ended = Ticket()

            def end(call: Call) -> None:
                made.discard(call)
                if not made:
                    ended.done = True
                    self._reader.notify(ended)

            try:
                self._watch_all(made, end)
                if made and not self._reader.wait(ended, deadline):
                    return False
            finally:
                self._unwatch_all(made, end)
        return self._reader.wait(self._hold_until_idle(me), deadline)

    @uninterrupted
    def resume(self) -> None:
        """Send calls again; does nothing if this thread has not paused dispatch."""
        if self._pauses.pop(threading.get_ident(), False):
            with self.lock.asked():
                self.holds -= 1
                self.pump()
                self._reader.ensure()

    def stay_paused(self) -> None:
        """Send no call again: the group is about to end."""
        self._pauses.pop(threading.get_ident(), None)

    @uninterrupted
    def _hold_until_idle(self, me: int) -> Ticket:
        idle = Ticket()
        with self.lock.asked():
            self.holds += 1
            self._pauses[me] = True
            self._idle.append(idle)
            self._notify_idle()
        return idle

    def _notify_idle(self) -> None:
        if not self._table.owed:
            for ticket in self._idle:
                ticket.done = True
                self._reader.notify(ticket)
            self._idle.clear()

    @uninterrupted
    def _watch_all(self, made: set[Call], end: Callable[[Call], None]) -> None:
        with self.lock.asked():
            made.update(self._unsettled())
            for call in tuple(made):
                self._watch(call, end)

    @uninterrupted
    def _unwatch_all(self, made: set[Call], end: Callable[[Call], None]) -> None:
        if made:
            with self.lock.asked():
                for call in tuple(made):
                    call.watchers = tuple(each for each in call.watchers if each is not end)
                    if not call.watchers:
                        self._reader.watched -= 1

    # --- the group's actor: membership ----------------------------------------------------

    def refuse(self, closed: Callable[[], BaseException]) -> None:
        """Refuse new calls with *closed*; those accepted go on."""
        with self.lock.asked():
            self._queue.closed = closed
            self._queue.admit(self._reader.notify, everyone=True)

    def expect(self, size: int, show: Callable[[], None]) -> None:
        """Accept only calls that *size* ranks can answer, and fail the queued ones that do not fit.

        The slots follow in `resize`, once the ranks beyond are gone. *show* publishes the new size,
        under the lock: before a call fails for it, and not before one can be made for it.
        """
        with self.lock.asked():
            misfits = self._queue.expect(size)
            show()
            for call in misfits:
                self.settle(call, call.misfit(size))
            self._queue.admit(self._reader.notify)

    def resize(self, size: int) -> None:
        """Have *size* slots; those beyond must be detached."""
        with self.lock.asked():
            self._table.resize(size)

    def attach(self, rank: int, incarnation: int, channel: Channel) -> None:
        """Add a new incarnation; from here on it may be sent calls of its own."""
        with self.lock.asked():
            channel.board.enter(self._sender.round)
            limit = None if self._snapshots is None else self._snapshots.limit
            self._table.attach(RankSlot(rank, incarnation, channel, saving_limit=limit))
            self._reader.add(channel.fileno())
            self.pump()
            self._reader.ensure()

    def open(self, epoch: int) -> None:
        """Send collective calls, under *epoch*; every rank is attached."""
        spin = spin_time(len(self._table)) if self._spins else 0.0
        with self.lock.asked():
            self._reader.spin = spin
            for slot in self._table:
                slot.channel.board.let_spin(spin)
            self._desyncs.begin_epoch()
            self._sender.epoch = epoch
            self._is_open = True
            self.pump()
            self._reader.ensure()

    def close_epoch(self) -> None:
        """Queue collective calls until `open`."""
        with self.lock.asked():
            self._is_open = False

    def count_foreign(self, rank: int, incarnation: int, packets: int) -> None:
        """Count *packets* that a rank has sent beside its answers and that are no messages."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is not None:
                self._drop_foreign(slot, packets)

    def expect_end(self, rank: int, incarnation: int) -> None:
        """Note that an incarnation is about to end: errors of the others may be its echo."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is not None:
                slot.ending = True

    def progress(self, rank: int, incarnation: int) -> Progress:
        """Read what *rank* has written, to the end, and return what it was doing."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is None:
                return Progress()
            self._is_open = False  # before its answers make room for further calls
            self._drain(slot)
            return slot.progress(self.clock())

    def out_of_step(self, wire: int) -> Desync | None:
        """Return why the ranks are out of step since the call *wire*, if they still are.

        Reads what they have written first.
        """
        with self.lock.asked():
            for slot in self._table:
                self._drain(slot)
            return self._desyncs.diagnose(wire)

    def running(self) -> list[Running]:
        """Read what the ranks have written; return those that owe answers.

        If there are none, *on_busy* is called when there are again.
        """
        with self.lock.asked():
            found: list[Running] = []
            for slot in self._table:
                owed = len(slot.sent)
                if owed:
                    self._drain(slot)
                    found.append(slot.running(spoke=len(slot.sent) != owed))
            self._sender.is_watched = bool(found)
            return found

    def lose(
        self,
        ranks: dict[int, int],
        story: Callable[[tuple[CallFate, ...], int], CrashReport] | None,
        error: Callable[[Call], BaseException],
        *,
        ends: bool = False,
    ) -> None:
        """Settle or send again the calls in flight on *ranks* (rank to incarnation).

        The ranks are dead, or are about to be stopped. What they had begun costs an attempt, or
        ends in *error*. Their channels stay open until `detach`: a rank that is being stopped may
        still be writing.

        Args:
            ranks: The ranks that are lost.
            story: Given the fates of the calls, and how many more are queued, returns the report
                that is kept for each attempt; None for a stop that was asked for. Called under the
                lock, before any caller gets an outcome.
            error: Returns what a call ends in, after *story*.
            ends: Whether the group will not serve again.
        """
        with self.lock.asked():
            found = (self._table.find(rank, incarnation) for rank, incarnation in ranks.items())
            lost = [slot for slot in found if slot is not None]
            self._is_open = False  # before their answers make room for further calls
            for slot in lost:
                self._drain(slot)
            survivors = [slot for slot in self._table if slot not in lost]
            if self._snapshots is not None:
                self._snapshots.lose([slot.rank for slot in lost], everybody=not survivors)
            # A stop that was asked for explains no exception.
            echoes = self._desyncs.echoes(None if story is None else lost)
            loss = assess(lost, survivors, echoes, self._sender.withdraw_unbegun(lost))
            report = None
            if story is not None:
                fates = loss.fates(self._queue, ends=ends)
                report = story(fates, 0 if ends else len(self._queue))
                loss.trace(report, fates)
            for call in loss.parts:
                for slot in lost:
                    if slot.rank not in call.answers and call.wire in slot.sent:
                        dead = Outcome(slot.rank, OutcomeKind.DEAD, error=error(call))
                        self._answer(call, slot.rank, dead)
            again = list(loss.untouched)
            for call in loss.begun:
                if report is not None:
                    call.reports += (report,)
                if call.retries > 0:
                    call.retries -= 1
                    again.append(call)
                else:
                    self.settle(call, error(call))
            self._send_again(again)
            for slot in lost:
                self._table.write_off(slot)
                slot.ended = True
                self._stop_reading(slot)
            self._desyncs.after_death()
            self.pump()
            self._reader.ensure()
            self._notify_idle()

    def detach(self, rank: int, incarnation: int) -> None:
        """Close the channel of an incarnation that is gone, after `lose`."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is not None:
                self._table.detach(slot)
                self._stop_reading(slot)
                slot.channel.close()

    def end(
        self, error: Callable[[Call], BaseException], closed: Callable[[], BaseException]
    ) -> None:
        """Settle every call that is left with *error*, and refuse new ones with *closed*."""
        with self.lock.asked():
            self._queue.closed = closed
            left = {id(call): call for call in self._unsettled()}
            for call in left.values():
                self.settle(call, error(call))
            self._queue.clear()
            self._queue.admit(self._reader.notify, everyone=True)
            self._notify_idle()

    def post(
        self, rank: int, incarnation: int, packet: bytes, *, leaves_epoch: bool = False
    ) -> None:
        """Queue *packet* behind the calls that *rank* has been sent.

        If it asks the rank to leave its process group (*leaves_epoch*), a rank that is held by a
        desync goes on to it.
        """
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is not None and not slot.ended:
                if leaves_epoch:
                    self._desyncs.release(slot)
                self._sender.transmit(slot, packet)

    # --- sending (under the lock from here on, but for `_on_ready`) -------------------------

    def pump(self) -> None:
        """Send the calls that may be sent, in order."""
        queue = self._queue
        while queue.everyone or queue.alone or queue.pool:
            turn = queue.take(self._table, is_open=self._is_open, paused=self.holds > 0)
            if turn is None:
                break
            self._sender.send(*turn)
        if queue.blocked and not self.holds:
            queue.admit(self._reader.notify)

    def _pump_after_read(self) -> None:
        """Send the calls that waited for answers, some of which have come."""
        queue = self._queue
        if queue.everyone or queue.alone or queue.pool:
            self.pump()
        if self._sender.batch:
            self._sender.send_batch_if_low()

    def _refused(self, slot: RankSlot, wire: int, error: OSError) -> None:
        """End the call in a packet that could not be sent to *slot*, whose rank is alive."""
        if wire not in slot.sent:
            return
        call = slot.sent.pop(wire)
        self._table.owed -= 1
        self._tidy(slot, wire)
        if call is not None:
            msg = f"{call.name} could not be sent to rank {slot.rank}: {error}"
            if self._snapshots is not None:
                self._snapshots.abandon(wire)
            self.withdraw(call, RuntimeFault(msg))

    # --- receiving --------------------------------------------------------------------------

    @uninterrupted
    def _on_ready(self, events: Events) -> None:
        """Read the channels that are ready; on the thread that reads, without the lock."""
        with self.lock.unasked:
            try:
                if self._taking is not None or self._settling is not None:
                    self._recover()
                by_fd = self._table.by_fd
                for fd, event in events:
                    slot = by_fd.get(fd)
                    if slot is None:
                        continue
                    if event & _WRITABLE:
                        self._sender.flush(slot)
                    if event & ~_WRITABLE and not self._read(slot):
                        # First: an exception thrown in would otherwise lose the end of the channel.
                        self._on_end(slot.rank, slot.incarnation)
                        slot.ended = True
                        self._stop_reading(slot)
                self._pump_after_read()
            except BaseException:  # thrown in: the event loop's thread does the rest
                self.loop.call_at(self.clock(), self._recover_all)
                raise

    def _recover_all(self) -> None:
        """Do what an interrupted `_on_ready` has not done; on the event loop's thread."""
        with self.lock.asked():
            for slot in self._table:
                self._drain(slot)
            self._table.owed = sum(len(slot.sent) for slot in self._table)
            self._notify_idle()
            self._reader.ensure()

    def _recover(self) -> None:
        """Do again what was interrupted: each step of it may be done twice."""
        if self._taking is not None:
            slot, call, frame = self._taking
            if call is None or not call.done:
                self._take(slot, call, frame)
            self._taking = None
        while self._settling is not None:
            self._conclude(self._settling[0])

    def _read(self, slot: RankSlot, *, to_end: bool = False) -> bool:
        """Handle the messages that are there; return False at the end of the channel.

        Without *to_end* it stops once the rank owes no answer.
        """
        receive = slot.channel.peek
        sent = slot.sent
        while True:
            frame = receive()
            if isinstance(frame, Frame):
                self._arrive(slot, frame)
            elif frame is _FOREIGN:
                self._drop_foreign(slot)
            else:
                return frame is _NOTHING
            if not sent and not to_end:
                return True  # another system call would find nothing

    def _drain(self, slot: RankSlot) -> None:
        """Handle every message that *slot* has written, after what was interrupted."""
        self._recover()
        if not slot.ended:
            self._read(slot, to_end=True)
        self._pump_after_read()

    def _stop_reading(self, slot: RankSlot) -> None:
        fd = slot.channel.fileno()
        if self._table.by_fd.get(fd) is slot:
            self._reader.remove(fd)
            del self._table.by_fd[fd]

    def _drop_foreign(self, slot: RankSlot, packets: int = 1) -> None:
        """Count *packets* of *slot* that are no messages; report the first."""
        self._dropped += packets
        if not slot.foreign:
            slot.foreign = True
            self._on_foreign(slot.rank)

    def _arrive(self, slot: RankSlot, frame: Frame) -> None:
        """Match *frame* to the sending it answers.

        Where it is marked as handled, and what follows is noted, no call stands in between: an
        exception is thrown in before the message has been taken, or after.
        """
        wire = frame.call_id
        channel = slot.channel
        if wire not in slot.sent or frame.incarnation != slot.incarnation:
            channel.unhandled = None
            frame.drop()
            self._dropped += 1
            return
        kind = frame.kind
        call = slot.sent[wire]
        if kind == _ITEM:
            channel.unhandled = None
            if call is None or call.done or call.wire != wire:
                self._drop_late(slot, frame)
            else:
                self._keep_item(call, slot.rank, frame)
            return
        if self._snapshots is not None:
            if kind in (Kind.SAVED, Kind.NOT_SAVED):
                if kind == Kind.NOT_SAVED:
                    self._desyncs.note(call, slot, frame)
                channel.unhandled = None
                self._snapshots.hear(slot.rank, frame)
                return
            self._snapshots.answered(slot.rank, wire)
        self._taking = (slot, call, frame)
        channel.unhandled = None
        del slot.sent[wire]
        self._table.owed -= 1
        self._take(slot, call, frame)
        self._taking = None

    def _take(self, slot: RankSlot, call: Call | None, frame: Frame) -> None:
        """Act on the answer *frame* to *call*, which has been taken off *slot*'s list."""
        wire, kind = frame.call_id, frame.kind
        if slot.noted or self._idle:
            self._tidy(slot, wire)
        if call is None or call.done or call.wire != wire:  # it was settled without this answer
            self._drop_late(slot, frame)
        elif kind == _REPLY:
            # A pipeline may keep thousands of these until they are asked for: they share one.
            self._answer(call, slot.rank, frame if frame.body else _NO_VALUE)
        elif kind == Kind.ERROR:
            self._desyncs.note(call, slot, frame)
            if call.shape is Shape.GATHER:
                self._answer(call, slot.rank, frame)
            else:
                self._fail(call, slot.rank, frame)
            self._desyncs.look(wire)
        else:
            frame.drop()

    def _drop_late(self, slot: RankSlot, frame: Frame) -> None:
        if frame.kind == Kind.ERROR:
            self._desyncs.note(None, slot, frame)
        if self._desyncs.splits:
            self._desyncs.look(frame.call_id)
        frame.drop()
        self._dropped += 1

    def _tidy(self, slot: RankSlot, wire: int) -> None:
        """Do what follows when *wire* has been taken off *slot*'s list."""
        slot.noted.pop(wire, None)
        self._notify_idle()

    # --- settling ---------------------------------------------------------------------------

    def _answer(self, call: Call, rank: int, answer: Frame | Outcome) -> None:
        """Add *rank*'s part of the outcome."""
        call.answers[rank] = answer
        if len(call.answers) == len(call.asked) and call.failed is None:
            self.settle(call)

    def _fail(self, call: Call, rank: int, frame: Frame) -> None:
        """Fail *call* with the exception of *rank*, unless that may be the echo of a death.

        A killed rank's connections close before its process is seen to end: in three of eight
        kills (gloo, four ranks) a survivor's "connection closed by peer" came first. It would pass
        for the survivor's own exception, and a call to be retried would fail. If every rank has
        raised, none of them has died of it.
        """
        may_be_echo = bool(frame.flags & Flag.BROKEN) and call.shape is Shape.COLLECTIVE
        if call.failed is None or not may_be_echo:
            call.failed = (frame, rank)
        if not may_be_echo or self._desyncs.have_all_raised(call.wire):
            self.withdraw(call)

    def settle(self, call: Call, error: BaseException | None = None) -> None:
        """End *call* with its answers, or with *error*; does nothing if it has ended."""
        if call.done:
            return
        call.error = error
        call.done = True
        self._settling = (call, self._settling)
        self._conclude(call)

    def _conclude(self, call: Call) -> None:
        """Do all that follows from the end of *call*, which is the latest of `_settling`."""
        if call.tap is not None:
            call.tap.settled(call)
        if call.span is not None:
            call.span.settled(call)
        call.drop()
        if call.timer is not None:
            call.timer.cancel()
        self._reader.notify(call)
        if call.future is not None:
            if call.future.is_whole:
                call.future.finish()
            call.future = None  # a cycle would keep its answers
        if call.watchers:
            for then in call.watchers:
                then(call)
            call.watchers = ()
            self._reader.watched -= 1
        if call.stream is not None:
            self._end_stream(call, call.stream)
        if self._desyncs.splits:
            self._desyncs.look(call.wire)
        assert self._settling is not None
        self._settling = self._settling[1]

    def withdraw(self, call: Call, error: BaseException | None = None) -> None:
        """Settle *call* before all have answered, and void the answers that are still to come."""
        self.settle(call, error)
        self._forget(call)

    def retract(self, calls: dict[int, Call]) -> None:
        """Send *calls*, by wire id, again, which no rank has begun and none will."""
        if self._snapshots is not None:
            for wire in calls:
                self._snapshots.abandon(wire)
        self._send_again(calls.values())

    def _send_again(self, calls: Iterable[Call]) -> None:
        """Void the answers to *calls*, and put them first in the queues."""
        calls = list(calls)
        for call in calls:
            self._forget(call)
        self._queue.put_back(calls)

    def _forget(self, call: Call) -> None:
        if not call.wire:
            self._queue.remove(call)
            return
        for slot in self._table:
            if call.wire in slot.sent:
                slot.sent[call.wire] = None  # it still owes the answer, which is void
                slot.noted[call.wire] = (call.name, call.seq, call.hang_after)

    def _watch(self, call: Call, then: Callable[[Call], None]) -> None:
        if not call.watchers:
            self._reader.watched += 1
        call.watchers += (then,)

    def _unsettled(self) -> Iterator[Call]:
        """Every call that is not settled; some more than once."""
        for slot in self._table:
            for call in list(slot.sent.values()):
                if call is not None and not call.done:
                    yield call
        yield from self._desyncs.calls()
        yield from self._queue


_REPLY: Final = Kind.REPLY  # looking an enum member up takes as long as a call
_ITEM: Final = Kind.ITEM
_NOTHING: Final = Arrival.NOTHING
_FOREIGN: Final = Arrival.FOREIGN
_WRITABLE: Final = select.EPOLLOUT
_NO_VALUE = Frame(_REPLY, 0, 0, 0, 0, 0, b"")

_guard = threading.Lock()
_locks: tuple[Callable[[], bool], ...] = ()  # of each plane: whether this thread has its lock


def _register(lock: OwnedLock, *, gone: bool = False) -> None:
    global _locks  # noqa: PLW0603  # read without a lock
    with _guard:
        others = tuple(each for each in _locks if each != lock.is_mine)
        _locks = others if gone else (*others, lock.is_mine)
