"""`CallPlane`: the calls of one rank group, under one lock.

- Every accepted call is settled exactly once, whichever process dies; everything later is void.
- All ranks get the collective calls in one order. A call takes a slot on every rank before its
  first byte is sent.
- An answer is matched by the number of the sending it belongs to, and by the incarnation it comes
  from; anything else is dropped and counted.
- The channel of a dead rank is read to its end before its calls are settled.
- The thread that reads runs no user code: answers are kept as bytes, callbacks run elsewhere.

`recovery` decides what a death costs each call. `Sender` (numbers, batches), `Streams` and
`DesyncMonitor` (ranks out of step) keep state of their own under the same lock.
"""

from __future__ import annotations

import os
import select
import threading
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from phalanx.actors.signals.interrupts import uninterrupted
from phalanx.actors.spec.results import Outcome, OutcomeKind
from phalanx.runtime import (
    ARENA_IDLE,
    BUNDLE_LIMIT,
    Arena,
    Arrival,
    Flag,
    Frame,
    Kind,
    OwnedLock,
    Payload,
    called_from_inside,
    descriptors,
    inline_limit,
    occupied,
)
from phalanx.supervision import ExecutorClosed, RuntimeFault

from .call import COLLECTIVE, GATHER
from .desync import DesyncMonitor
from .queue import CallQueue
from .rank import Progress, RankSlot, RankTable
from .reader import Reader, Ticket, spin_time
from .recovery import assess
from .sender import Sender
from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from phalanx.actors.checkpoint.coordinator import CheckpointCoordinator
    from phalanx.actors.observe.status_feed import CallMeter
    from phalanx.actors.spec.layout import Layout
    from phalanx.runtime import CallFate, Channel, CrashReport, Encoded, EventLoop, Timer

    from .call import Call
    from .desync import Desync
    from .reader import Events, Poller


class CallPlane:
    """The calls of one rank group.

    Args:
        loop: Timers, and reads while no caller does.
        depth: Calls that one rank may owe; also calls that may be queued before `submit` blocks.
        snapshots: The checkpoint coordinator; None if ranks store no state.
        spins: Whether callers and ranks may poll for a moment before blocking (`spin_time`).
        on_end: Under the lock, called with (rank, incarnation) when a rank's channel ends, once or
            more.
        on_busy: Under the lock, called when ranks owe answers again, and for each call with a
            limit, which it gets.
        on_desync: Under the lock, called with the number of a sending after which the ranks are out
            of step, again and again until `out_of_step` is.
        inner: Each returns whether this thread has a lock that is taken under the plane's.
        poller: The readiness of channels; None for epoll(7).
        clock: The clock of *loop* and of deadlines.

    Attributes:
        pid: The driver's; a forked child has another.
        holds: How many reasons there are to send no new call: pauses, and ranks out of step.
        meter: Counts calls by outcome; None until an observer requests a status.
        wait: `Reader.wait`.
        inline_limit: Bytes of arguments that travel in the packets of a call.
    """

    def __init__(
        self,
        loop: EventLoop,
        layout: Layout,
        *,
        depth: int,
        snapshots: CheckpointCoordinator | None,
        spins: bool,
        log: Any,
        on_end: Callable[[int, int], None],
        on_busy: Callable[[float | None], None],
        on_desync: Callable[[int], None],
        inner: tuple[Callable[[], bool], ...],
        poller: Poller | None,
        clock: Callable[[], float],
    ) -> None:
        self.loop = loop
        self.log = log
        self.clock = clock
        self.pid = os.getpid()
        self.arena = Arena.create()
        locked = () if snapshots is None else (snapshots.is_locked,)
        self.lock = OwnedLock(*inner, loop.is_inside, *locked)
        self._snapshots = snapshots
        self._spins = spins
        self._is_near = poller is None
        size = layout.world_size
        self._fit(size)
        self._on_end = on_end
        self._queue = CallQueue(layout, depth)
        self._table = table = RankTable(size)
        with descriptors.closed_on_error(self.arena):
            self._reader = reader = Reader(
                loop, self.lock, table, self._on_ready, poller=poller, clock=clock
            )
        self.wait = reader.wait
        self._sender = Sender(table, reader, snapshots, self._refused, on_busy)
        self._desyncs = DesyncMonitor(self, table, self._sender, on_desync)
        self.streams = Streams(self, table, self._sender, reader)
        self._pausing: dict[int, bool] = {}  # threads: whether `holds` counts them yet
        self._idle: list[Ticket] = []  # done once no rank owes an answer
        self._trimmer: Timer | None = None
        self._is_open = False  # whether every rank is attached, under one epoch
        self._dropped = 0  # void answers and foreign packets
        # What an exception that was thrown in has interrupted, until it is done again: an answer,
        # taken off its rank's list, and calls that are being settled, the latest first.
        self._taking: tuple[RankSlot, Call, Frame] | None = None
        self._settling: tuple[Call, Any] | None = None
        self.holds = 0
        self.meter: CallMeter | None = None
        _locks.append(self.lock.is_mine)

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
        _locks.remove(self.lock.is_mine)

    def _fit(self, size: int) -> None:
        """Set `inline_limit` for *size* ranks; to ranks elsewhere a large body travels once."""
        self.inline_limit = inline_limit(size) if self._is_near else BUNDLE_LIMIT

    # --- callers: before a call -----------------------------------------------------------

    @uninterrupted
    def pack(self, encoded: Encoded) -> Payload:
        """Copy large buffers of *encoded* for this group's ranks, or raise `MessageTooLarge`."""
        return Payload.of(encoded, self.arena, self.inline_limit)

    def check_may_enter(self, what: str, *, waits: bool) -> None:
        """Raise `WouldDeadlock` if *what* interrupts the plane's own code on this thread.

        One that *waits* may not interrupt what other threads wait for, either.
        """
        if self.is_inside(waits=waits):
            raise called_from_inside(what)

    def is_inside(self, *, waits: bool) -> bool:
        """Whether `check_may_enter` would raise."""
        if self.lock.is_inside():
            return True
        if len(_locks) > 1 and any(is_mine() for is_mine in tuple(_locks)):
            return True  # another group's: its lock and this one, taken in both orders
        return waits and (
            self._reader.is_mine()
            or self.arena.is_held()
            or occupied.is_mine()
            or threading.get_ident() in self._pausing
        )

    def check_process(self, call: Call) -> None:
        """Raise unless this is the process that made *call*, where its answers are read and lie."""
        if os.getpid() != self.pid:
            msg = f"{call.name} was called by the parent process, which has the answer"
            raise ExecutorClosed(msg)

    @uninterrupted
    def check_open(self) -> None:
        """Raise the error of new calls, if they are refused."""
        with self.lock.asked():
            if self._queue.closed is not None:
                raise self._queue.closed()

    @uninterrupted
    def has_room(self) -> bool:
        """Whether there is room for a call."""
        with self.lock.asked():
            return self._queue.closed is not None or not self._queue.is_full

    @uninterrupted
    def when_room(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        """Return None if there is room for a call; else what withdraws the caller.

        *wake* is called under the lock once there is room. A caller that makes no call then has to
        withdraw too: the next in line gets its place.
        """
        with self.lock.asked():
            if self._queue.closed is not None or not self._queue.is_full:
                return None
            return partial(self._give_up, self._queue.block(wake))

    @uninterrupted
    def _give_up(self, place: Ticket) -> None:
        """Withdraw the caller that waits for *place*, or has it and makes no call."""
        with self.lock.asked():
            self._queue.unblock(place)
            self.pump()

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
        if call.probe is not None:
            call.probe.issued(call)
        if self.meter is not None:
            self.meter.begun(call)
        while (place := self._accept(call, waits or at_once, waits)) is not None:
            admitted = False
            try:
                self.check_may_enter(call.name, waits=True)
                admitted = self._reader.wait(place, call.options.deadline)
            finally:
                if not admitted:
                    self._give_up(place)
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
                    self._trimmer = self.loop.call_at(self.clock() + ARENA_IDLE, self._trim)
                queue.add(call)
                self.pump()
                if not waits:
                    self._reader.ensure()
                return None
        call.drop()
        if closed is not None:
            raise closed()
        raise call.misfit(size)

    def _trim(self) -> None:
        """Return the arena's idle memory to the system."""
        # Not under the plane's lock: a thread inside the arena may have to call the plane.
        wait = self.arena.trim_if_idle(self.clock())
        with self.lock.asked():
            self._trimmer = None
            if wait is not None and self.arena.fd >= 0:
                self._trimmer = self.loop.call_at(self.clock() + wait, self._trim)

    @uninterrupted
    def expire(self, call: Call) -> dict[int, int]:
        """Settle *call* as timed out unless done; return the ranks that owe it, by incarnation."""
        with self.lock.asked():
            self._finish_turn()
            if call.done:
                return {}
            owing = [slot for slot in self._table if slot.sent.get(call.wire) is call]
            if call.shape is GATHER and call.wire:
                errors = {rank: call.timed_out() for rank in call.missing}  # each names all of them
                for rank, error in errors.items():
                    call.answers[rank] = Outcome(rank, OutcomeKind.TIMEOUT, error=error)
                self.withdraw(call)
            else:
                self.withdraw(call, None if call.failed is not None else call.timed_out())
            self.pump()
            return {slot.rank: slot.incarnation for slot in owing}

    @uninterrupted
    def abandon(
        self, call: Call, cause: BaseException | None = None, *, unsent_only: bool = False
    ) -> bool:
        """Withdraw *call*, or void its answers if it has been sent; False if it is done.

        False as well in a forked child, whose copy of a call ends nothing.

        *cause* is what its caller gets in place of the outcome. *unsent_only* lets a call that has
        been sent go on, and returns False.
        """
        if os.getpid() != self.pid:
            return False
        with self.lock.asked():
            self._finish_turn()
            if call.done or (unsent_only and call.wire):
                return False
            if call.probe is not None and cause is not None:
                call.probe.raised(cause)
            if self.meter is not None and cause is not None:
                self.meter.settled(call, cause)
            self.withdraw(call, CancelledError())
            self.pump()
            return True

    @uninterrupted
    def when_settled(self, call: Call, then: Callable[[Call], None]) -> None:
        """Run ``then(call)`` when *call* is done, on the thread that settles it: be quick."""
        self.check_process(call)
        with self.lock.asked():
            if not call.done:
                self._reader.watched += not call.watchers
                call.watchers += (then,)
                self._reader.ensure()
                return
        then(call)

    @uninterrupted
    def counts(self) -> dict[str, int]:
        """Return how many calls are in flight and queued, and how many answers were void."""
        with self.lock.asked():
            sent = {id(call) for call in self.unsettled() if call.wire}
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

    # --- callers: pauses --------------------------------------------------------------------

    def pause(self, deadline: float | None, *, every_call: bool = False) -> bool:
        """Queue new calls from now on; return True once no call is in flight, False at *deadline*.

        With *every_call* new calls are sent until all that were made before have ended, queued ones
        included. However it ends, `resume` must follow on the same thread, in a ``finally``; or
        `stay_paused`, if it was True. Between the two this thread may not wait for a call.
        """
        self._pausing[threading.get_ident()] = False
        if every_call and not all(self.wait(call, deadline) for call in self._made()):
            return False
        return self.wait(self._hold(), deadline)

    @uninterrupted
    def resume(self) -> None:
        """Send calls again; does nothing if this thread has not paused dispatch."""
        if self._pausing.pop(threading.get_ident(), False):
            with self.lock.asked():
                self.holds -= 1
                self.pump()
                self._reader.ensure()

    def stay_paused(self) -> None:
        """Send no call again: the group is about to end."""
        self._pausing.pop(threading.get_ident(), None)

    @uninterrupted
    def _made(self) -> list[Call]:
        with self.lock.asked():
            self._finish_turn()
            return list(self.unsettled())

    @uninterrupted
    def _hold(self) -> Ticket:
        ticket = Ticket()
        with self.lock.asked():
            self._finish_turn()
            self.holds += 1
            self._pausing[threading.get_ident()] = True
            self._idle.append(ticket)
            self._notify_idle()
        return ticket

    def _notify_idle(self) -> None:
        """Fulfil the tickets in *_idle* if no rank owes an answer. Under the lock."""
        if not self._table.owed:
            for ticket in self._idle:
                self._reader.fulfil(ticket)
            self._idle.clear()

    # --- the group's actor: membership ----------------------------------------------------

    def refuse(self, closed: Callable[[], BaseException]) -> None:
        """Refuse new calls with *closed*; those accepted go on."""
        with self.lock.asked():
            self._queue.closed = closed
            self._queue.admit(self._reader.fulfil, everyone=True)

    def expect(self, layout: Layout, show: Callable[[], None]) -> None:
        """Accept only calls for *layout*, and fail those that do not fit it; `resize` follows.

        *show* publishes it: before a call fails for it, after the first can be made for it.
        """
        with self.lock.asked():
            self._finish_turn()
            misfits = self._queue.expect(layout)
            self._fit(layout.world_size)
            show()
            for call in misfits:
                self.settle(call, call.misfit(layout.world_size))
            self._queue.admit(self._reader.fulfil)

    def resize(self, size: int) -> None:
        """Have *size* slots; those beyond must be detached."""
        with self.lock.asked():
            self._table.resize(size)

    def attach(self, rank: int, incarnation: int, channel: Channel) -> None:
        """Add a new incarnation; from here on it may be sent calls of its own."""
        with self.lock.asked():
            channel.page.enter(self._sender.round)
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
                slot.channel.page.let_spin(spin)
            self._desyncs.begin_epoch()
            self._sender.epoch = epoch
            self._is_open = True
            self.pump()
            self._reader.ensure()

    def close_epoch(self) -> None:
        """Queue collective calls until `open`."""
        with self.lock.asked():
            self._is_open = False

    def count_foreign_packet(self, rank: int, incarnation: int) -> None:
        """Count a packet that a rank has sent beside its answers and that is no message."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is not None:
                self._drop_foreign_packet(slot)

    def expect_end(self, rank: int, incarnation: int) -> None:
        """Note that an incarnation is about to end: errors of the others may be its echo."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is not None:
                slot.ending = True

    def progress(self, rank: int, incarnation: int) -> Progress:
        """Read all that *rank* has written, and return what it was doing."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is None:
                return Progress(rank, incarnation)
            self._is_open = False  # before its answers make room for further calls
            self._drain(slot)
            return slot.progress(self.clock())

    def owes(self, rank: int, incarnation: int, wire: int) -> bool:
        """Read all that *rank* has written; return whether it has yet to answer *wire*."""
        with self.lock.asked():
            slot = self._table.find(rank, incarnation)
            if slot is not None:
                self._drain(slot)
            return slot is not None and wire in slot.sent

    def out_of_step(self, wire: int) -> Desync | None:
        """Return why the ranks are out of step since the call *wire*, if they still are.

        Reads what they have written first.
        """
        with self.lock.asked():
            for slot in self._table:
                self._drain(slot)
            return self._desyncs.diagnose(wire)

    def running(self) -> list[Progress]:
        """Read what the ranks have written; return those that owe answers.

        If there are none, *on_busy* is called when there are again.
        """
        with self.lock.asked():
            found: list[Progress] = []
            for slot in self._table:
                owed = len(slot.sent)
                if owed:
                    self._drain(slot)
                    found.append(slot.progress(self.clock(), spoke=len(slot.sent) != owed))
            self._sender.is_watched = bool(found)
            return found

    def lose(
        self,
        ranks: dict[int, int],
        make_report: Callable[[tuple[CallFate, ...], int], CrashReport] | None,
        error: Callable[[Call], BaseException],
        *,
        ends: bool = False,
    ) -> None:
        """Settle or send again the calls in flight on *ranks* (rank to incarnation).

        The ranks are dead, or are about to be stopped: then they may still be writing, and their
        channels stay open until `detach`.

        Args:
            ranks: The ranks that are lost.
            make_report: Given the fates of the calls, and how many more are queued, returns the
                report that is kept for each attempt; None for a requested stop. Called under
                the lock, before any caller gets an outcome.
            error: After *make_report*, returns what a call ends in that is not sent again.
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
            # A requested stop explains no exception.
            echoes = self._desyncs.echoes(None if make_report is None else lost)
            loss = assess(lost, survivors, echoes, self._sender.withdraw_unbegun(lost))
            report = None
            if make_report is not None:
                fates = loss.fates(self._queue, ends=ends)
                report = make_report(fates, 0 if ends else len(self._queue))
                loss.trace(report, fates)
            for call in loss.parts:
                for slot in lost:
                    if slot.rank not in call.answers and call.wire in slot.sent:
                        dead = Outcome(slot.rank, OutcomeKind.DEAD, error=error(call))
                        self._answer(call, slot.rank, dead)
            again = list(loss.untouched)
            if self._snapshots is not None:
                for call in again:
                    self._snapshots.abandon(call.wire)
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
                self._table.owed -= len(slot.sent)
                slot.sent.clear()
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
            self._finish_turn()
            self._queue.closed = closed
            for call in list(self.unsettled()):
                self.settle(call, error(call))
            self._queue.clear()
            self._queue.admit(self._reader.fulfil, everyone=True)
            self._notify_idle()

    def post(
        self, rank: int, incarnation: int, packet: bytes, *, leaves_epoch: bool = False
    ) -> None:
        """Send *packet* behind the calls that *rank* has been sent.

        *leaves_epoch*: it asks the rank to leave its process group; one held by a desync goes on.
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
        try:
            if queue.turn is not None:
                self._finish_turn()
            while queue.everyone or queue.alone or queue.pool:
                turn = queue.take(self._table, is_open=self._is_open, paused=self.holds > 0)
                if turn is None:
                    break
                self._sender.send(*turn)
                queue.turn = None
        except BaseException:  # thrown in: its ranks get the call all the same, before any other
            self._finish_turn()
            raise
        if queue.blocked and not self.holds:
            queue.admit(self._reader.fulfil)

    def _finish_turn(self) -> None:
        """Send the call whose sending an exception has interrupted, if there is one.

        Called first wherever every call must be in a queue or on the lists of its ranks. A call
        that cannot be sent is failed.
        """
        queue = self._queue
        if queue.turn is None:
            return
        call, slots = queue.turn
        for is_last in (False, True):
            if call.done:  # refused by a rank, after all had been sent it
                break
            try:
                self._sender.send(call, slots)
                break
            except Exception as error:  # noqa: BLE001  # thrown in as well, or raised each time
                if is_last:
                    self.withdraw(call, RuntimeFault(f"{call.name} could not be sent: {error}"))
        queue.turn = None

    def _pump_after_read(self) -> None:
        """Send the calls that waited for answers, some of which have come."""
        queue = self._queue
        if queue.everyone or queue.alone or queue.pool or queue.blocked:
            self.pump()
        if self._sender.batch:
            self._sender.send_batch_if_low()

    def _refused(self, slot: RankSlot, wire: int, error: OSError) -> None:
        """End the call in a packet that could not be sent to *slot*, whose rank is alive."""
        if wire not in slot.sent:
            return
        call = slot.sent.pop(wire)
        self._table.owed -= 1
        self._notify_idle()
        if self._snapshots is not None:
            self._snapshots.abandon(wire)
        if not call.done:
            msg = f"{call.name} could not be sent to rank {slot.rank}: {error}"
            self.withdraw(call, RuntimeFault(msg))

    # --- receiving --------------------------------------------------------------------------

    @uninterrupted
    def _on_ready(self, events: Events) -> None:
        """Read the channels that are ready; on the thread that reads, without the lock."""
        with self.lock.unasked:
            try:
                if self._taking or self._settling or self._queue.turn:
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
            self._recover()
            for slot in self._table:
                self._drain(slot)
            self._table.owed = sum(len(slot.sent) for slot in self._table)
            self._notify_idle()
            self._reader.ensure()

    def _recover(self) -> None:
        """Do again what was interrupted: each step of it may be done twice."""
        self._finish_turn()
        if self._taking is not None:
            slot, call, frame = self._taking
            if not call.done or call.wire != frame.call_id:
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
                self._drop_foreign_packet(slot)
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

    def _drop_foreign_packet(self, slot: RankSlot) -> None:
        """Count a packet of *slot* that is no message; report the first."""
        self._dropped += 1
        if not slot.sent_foreign_packet:
            slot.sent_foreign_packet = True
            self.log.warning("phalanx.foreign_packet", rank=slot.rank, on="driver")

    def _arrive(self, slot: RankSlot, frame: Frame) -> None:
        """Match *frame* to the sending it answers.

        No call stands between `unhandled = None` and the note of what follows: an exception is
        thrown in before the message has been taken, or after.
        """
        wire = frame.call_id
        channel = slot.channel
        sent = slot.sent
        if wire not in sent or frame.incarnation != slot.incarnation:
            channel.unhandled = None
            frame.drop()
            self._dropped += 1
            return
        kind = frame.kind
        call = sent[wire]
        if kind != _REPLY:
            if kind == _ITEM:
                channel.unhandled = None
                if call.done or call.wire != wire:
                    self._drop_late(slot, frame)
                else:
                    self.streams.keep(call, slot.rank, frame)
                return
            if kind == _ERROR and self._is_death(call, slot, frame):
                channel.unhandled = None
                frame.drop()
                return
        if self._snapshots is not None:
            if kind in (Kind.SAVED, Kind.NOT_SAVED):
                if kind == Kind.NOT_SAVED:
                    self._desyncs.note(call, slot, frame)
                channel.unhandled = None
                self._snapshots.on_frame(slot.rank, frame)
                return
            is_broken = kind == _ERROR and frame.flags & Flag.BROKEN and call.shape is COLLECTIVE
            if is_broken and call.retries and not call.done:  # it is about to be sent again
                self._snapshots.abandon(wire)
            else:
                self._snapshots.answered(slot.rank, wire)
        self._taking = (slot, call, frame)
        channel.unhandled = None
        del sent[wire]
        self._table.owed -= 1
        if kind != _REPLY or self._idle or call.done or call.wire != wire:
            self._take(slot, call, frame)
        else:  # as `_take` would, but sooner
            self._answer(call, slot.rank, frame if frame.body else _NO_VALUE)
        self._taking = None

    def _is_death(self, call: Call, slot: RankSlot, frame: Frame) -> bool:
        """Whether *frame* announces a death that retries *call*, and is no answer to it.

        The call then stays owed by *slot* until its rank has ended, as if that had died in it.
        """
        if not frame.flags & Flag.FATAL:
            return False
        slot.ending = True
        is_open = not call.done and call.wire == frame.call_id and call.shape is not GATHER
        return is_open and call.retries > 0

    def _take(self, slot: RankSlot, call: Call, frame: Frame) -> None:
        """Act on the answer *frame* to *call*, which has been taken off *slot*'s list."""
        wire, kind = frame.call_id, frame.kind
        if self._idle:
            self._notify_idle()
        if call.done or call.wire != wire:  # it was settled without this answer
            self._drop_late(slot, frame)
        elif kind == _REPLY:
            # A pipeline may keep thousands of these until they are read: they share one.
            self._answer(call, slot.rank, frame if frame.body else _NO_VALUE)
        elif kind == _ERROR:
            self._desyncs.note(call, slot, frame)
            if call.shape is GATHER:
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
        raised, none of them has died of it; but a call to be retried waits for the group to be
        re-formed.
        """
        may_be_echo = bool(frame.flags & Flag.BROKEN) and call.shape is COLLECTIVE
        if call.failed is None or not may_be_echo:
            call.failed = (frame, rank)
        if not may_be_echo or self._desyncs.explains_itself(call):
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
        if call.probe is not None:
            call.probe.settled(call)
        if call.span is not None:
            call.span.settled(call)
        if self.meter is not None:
            self.meter.settled(call)
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
            self.streams.end(call, call.stream)
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
                slot.sent[call.wire] = call.void()  # it still owes the answer

    def unsettled(self) -> Iterator[Call]:
        """Every call that is not settled; some more than once."""
        for slot in self._table:
            for call in list(slot.sent.values()):
                if not call.done:
                    yield call
        yield from self._desyncs.calls()
        yield from self._queue


_REPLY: Final = Kind.REPLY  # looking an enum member up takes as long as a call
_ITEM: Final = Kind.ITEM
_ERROR: Final = Kind.ERROR
_NOTHING: Final = Arrival.NOTHING
_FOREIGN: Final = Arrival.FOREIGN
_WRITABLE: Final = select.EPOLLOUT
_NO_VALUE = Frame(_REPLY, 0, 0, 0, 0, 0, b"")

_locks: list[Callable[[], bool]] = []  # of each plane: whether this thread has its lock
