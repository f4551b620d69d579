"""Call plane: the one owner of a group's calls.

The one owner of a group's calls: it sends them, reads the answers, and settles each once.

Guarantees:
- every accepted call is settled exactly once, whatever dies (`docs/semantics.md`);
- all ranks get the collective calls in one order, and a call takes a slot on every rank before
  its first byte goes out;
- nobody runs another's code while reading: answers are kept as bytes, callbacks run elsewhere.

This file has the lock and says what happens in which order. The parts under that lock each have
one thing to keep: who sits where and owes what (`seat`), the coming and going of ranks and what
that costs calls (`seating`, `losing`), the queues (`turns`), how a call leaves
(`sending`) and is kept back (`holding`), how answers come in (`arriving`), their call's outcome
(`settling`), the items of streams (`taking`).

Left to others: who reads (`reading`), when ranks come and go (`executor_actor`), what a call
means (`calls`).

Moments in which nothing is in flight: new calls are kept back until those that were sent ended.

Guarantees: between a `wait_idle` that returned True and its `resume` nothing new is sent, but for
what was made for that moment; who waits in vain, or is interrupted, keeps nobody back. A finalizer
or signal handler that interrupts who keeps calls back may not wait for one.

Left to others: what the moment is used for (`rank_group`, `core`). The lock is the plane's.

Something to wait for that happens once, told of under locks.

Guarantees: `set` never waits, also where a signal handler or finalizer that has interrupted `wait`
comes to it on the same thread. `threading.Event` would wait for itself there: its own lock is held
for a moment by who waits.

When a group's arena gives back the memory that lies idle.

Guarantees: memory that nobody has any more is given back within `ARENA_LONGEST` seconds, and
`ARENA_IDLE` after the last message where no reader kept any. At rest no timer runs, unless a reader
keeps something, which a rank that is stopped does; then looks become rare.

Left to others: the memory itself (`runtime.arena`).
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from phalanx.actors.signals.interrupts import uninterrupted
from phalanx.actors.spec.adaptive_spin import Spinning
from phalanx.runtime import (
    ARENA_IDLE,
    ARENA_LONGEST,
    Arena,
    OwnedLock,
    Payload,
    called_from_inside,
    occupied,
)
from phalanx.supervision import RuntimeFault, StreamNotTaken

from .queue import Turns
from .rank import Progress, Seat, Seats
from .reader import Reading, Ticket
from .receiving import Arriving, Settling
from .recovery import Seating
from .sending import Sending
from .streams import GIVEN_UP, Taking

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors.checkpoint.coordinator import Cuts
    from phalanx.runtime import Encoded, Frame, Hub, Timer

    from .call import Call


class Trimming:
    """Trims one arena once nothing has been placed in it for a while. Under the plane's lock."""

    def __init__(self, hub: Hub, lock: OwnedLock, arena: Arena) -> None:
        self._hub = hub
        self._lock = lock
        self._arena = arena
        self._timer: Timer | None = None

    def later(self, wait: float = ARENA_IDLE) -> None:
        """See to it that the arena, which is in use, is trimmed when it no longer is."""
        arena = self._arena
        if self._timer is not None or arena.fd < 0:
            return
        placed = arena.placed

        def look() -> None:
            idle = arena.placed == placed
            if idle:
                # Not under the plane's lock: who is inside the arena may have to call the plane.
                arena.trim()
            with self._lock.asked():
                self._timer = None
                if arena.is_warm:
                    # Idle and yet warm: a reader keeps something. Then look less often.
                    self.later(min(2 * wait, ARENA_LONGEST) if idle else ARENA_IDLE)

        self._timer = self._hub.call_at(time.monotonic() + wait, look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()


class Latch:
    """One thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let who waits go on; to be called once."""
        self._lock.release()

    def wait(self, deadline: float | None) -> bool:
        """Return True once it has happened, False at *deadline* (monotonic); None for none."""
        if deadline is None:
            return self._lock.acquire()
        left = max(0.0, deadline - time.monotonic())
        return self._lock.acquire(timeout=min(left, threading.TIMEOUT_MAX))


class Holding:
    """Keeps back the new calls of one group."""

    def __init__(
        self,
        lock: OwnedLock,
        *,
        seats: Seats,
        reading: Reading,
        sending: Sending,
        settling: Settling,
    ) -> None:
        self._lock = lock
        self._seats = seats
        self._reading = reading
        self._sending = sending
        self._settling = settling
        self._holds: dict[int, _Hold] = {}  # by the thread that keeps calls back, or is about to

    @property
    def count(self) -> int:
        """How many keep new calls back just now."""
        return self._sending.holds

    def is_mine(self) -> bool:
        """Whether this thread keeps calls back, so that it would wait for itself."""
        return threading.get_ident() in self._holds

    def wait_idle(self, deadline: float | None, *, every_call: bool = False) -> bool:
        """Keep new calls back; return True once every call that was sent has been answered.

        With *every_call* all that were made so far have ended before that, those too that wait for
        their turn or for a restart. Returns False at *deadline*. However it ends, `resume` must
        follow on the same thread, in a ``finally`` around this; or `leave_idle`, if it was True.
        """
        hold = _Hold()
        self._holds[threading.get_ident()] = hold
        if every_call and not self._wait_for_all(deadline):
            return False
        self._take(hold)
        if not hold.wait(deadline):
            return False
        self._stop_watching(hold)
        return True

    @uninterrupted
    def resume(self) -> None:
        """Let calls go again; does nothing where this thread keeps none back."""
        hold = self._holds.pop(threading.get_ident(), None)
        if hold is None:
            return
        self._stop_watching(hold)
        if hold.is_taken:
            with self._lock.asked():
                self._sending.holds -= 1
                self._sending.pump()
                self._reading.see_to_it()

    def leave_idle(self) -> None:
        """Let no call go again: this is the end."""
        self._holds.pop(threading.get_ident(), None)

    @uninterrupted
    def _take(self, hold: _Hold) -> None:
        with self._lock.asked():
            hold.is_taken = hold.is_watched = True
            self._sending.holds += 1
            self._reading.watched += 1
            self._seats.when_idle(hold)
            self._reading.see_to_it()

    @uninterrupted
    def _stop_watching(self, hold: _Hold) -> None:
        with self._lock.asked():
            if hold.is_watched:
                hold.is_watched = False
                self._reading.watched -= 1

    def _wait_for_all(self, deadline: float | None) -> bool:
        """Return True once every call made so far has ended, False at *deadline*."""
        done = Latch()
        left: set[Call] = set()

        def end(call: Call) -> None:
            left.discard(call)
            if not left:
                done.set()

        if not self._watch_all(left, end):
            return True
        ok = False
        try:
            ok = done.wait(deadline)
        finally:
            if not ok:
                self._unwatch(left, end)
        return ok

    @uninterrupted
    def _watch_all(self, left: set[Call], end: Callable[[Call], None]) -> bool:
        with self._lock.asked():
            left.update(self._settling.calls())
            for call in tuple(left):
                self._settling.watch(call, end)
            self._reading.see_to_it()
            return bool(left)

    @uninterrupted
    def _unwatch(self, left: set[Call], end: Callable[[Call], None]) -> None:
        with self._lock.asked():
            for call in tuple(left):
                self._settling.unwatch(call, end)


class _Hold(Latch):
    """What one thread has of it; a Ctrl-C may strike as soon as it has taken or given back some.

    Attributes:
        is_taken: Whether calls are kept back for it.
        is_watched: Whether answers are read at once for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_taken = False
        self.is_watched = False


class Plane:
    """The calls of one rank group.

    Args:
        depth: Calls that one rank may have been sent and not answered; also how many calls may
            wait for their turn before `submit` blocks.
        cuts: What becomes of the states that ranks store with calls; None where they store none.
        spinning: How long to look for messages before sleeping.
        on_end: Told (rank, incarnation) when a rank's stream ends; runs under no lock.
        on_foreign: Told the rank whose socket brought something that is no message, once for each
            incarnation; runs under the lock.
        on_busy: Told that ranks owe answers again, and of each call with a limit, which it is
            given. Runs under the lock, in a caller's thread: it must be quick.
        on_untaken: Told of each stream that has been closed because nothing took its items.
        on_split: Told the number of a sending after which the ranks are out of step, until
            something is done about that (`Seating.out_of_step`); runs under the lock.
        inner: Say each whether this thread has a lock that is taken under the plane's.
    """

    def __init__(
        self,
        hub: Hub,
        size: int,
        *,
        depth: int = 64,
        cuts: Cuts | None = None,
        spinning: Spinning = Spinning(0.0),  # noqa: B008  # frozen
        on_end: Callable[[int, int], None],
        on_foreign: Callable[[int], None] = lambda _: None,
        on_busy: Callable[[float | None], None] = lambda _limit: None,
        on_untaken: Callable[[Call], None] = lambda _: None,
        on_split: Callable[[int], None] = lambda _wire: None,
        inner: tuple[Callable[[], bool], ...] = (),
    ) -> None:
        self._hub = hub
        self.pid = os.getpid()  # of the driver; a forked child is none
        self.arena = Arena.create()
        inner = (*inner, hub.is_inside) if cuts is None else (*inner, hub.is_inside, cuts.is_locked)
        self._lock = lock = OwnedLock(*inner)
        self._seats = seats = Seats(size)
        self._turns = turns = Turns(size, depth)
        self._reading = reading = Reading(hub, lock, lambda: seats.owed > 0)
        self._sending = sending = Sending(
            seats,
            turns,
            reading,
            depth=depth,
            cuts=cuts,
            on_refused=self._refused,
            on_busy=on_busy,
        )
        self._cuts = cuts
        self._on_untaken = on_untaken
        self._taking = taking = Taking(hub, seats, reading, sending, self._on_late_taker)
        self._settling = settling = Settling(
            hub,
            lock,
            seats=seats,
            turns=turns,
            reading=reading,
            taking=taking,
            sending=sending,
            cuts=cuts,
            on_split=on_split,
        )
        self._arriving = arriving = Arriving(
            lock,
            seats=seats,
            reading=reading,
            sending=sending,
            taking=taking,
            settling=settling,
            cuts=cuts,
            on_end=on_end,
            on_foreign=on_foreign,
        )
        self.seating = Seating(
            lock,
            seats=seats,
            turns=turns,
            reading=reading,
            sending=sending,
            settling=settling,
            arriving=arriving,
            cuts=cuts,
            spinning=spinning,
        )
        self.holding = Holding(
            lock, seats=seats, reading=reading, sending=sending, settling=settling
        )
        self._trimming = Trimming(hub, lock, self.arena)
        reading.start(arriving.on_ready, self._on_nudge)
        _add(lock)

    # --- the end --------------------------------------------------------------------------

    def refuse(self, closed: Callable[[], BaseException]) -> None:
        """Accept no new calls; those accepted go on."""
        with self._lock.asked():
            self._turns.closed = closed
            self._turns.admit(self._reading.wake, everyone=True)

    def close(self) -> None:
        """Give everything back; no call is left (`end`)."""
        with self._lock.asked():
            for seat in self._seats:
                seat.channel.close()
            self._seats.clear()
            self._trimming.close()
        self.arena.close()
        self._reading.close()
        _add(self._lock, gone=True)

    # --- calls --------------------------------------------------------------------------

    @uninterrupted
    def pack(self, encoded: Encoded) -> Payload:
        """Return *encoded* as it will travel to this group's ranks; what is large is copied now.

        Raises:
            MessageTooLarge: there is not memory enough for it.
        """
        return Payload.of(encoded, self.arena)

    def check_may_enter(self, what: str, *, waits: bool) -> None:
        """Raise `WouldDeadlock` where *what* came out of the plane's own code on this thread.

        One that *waits* must not have interrupted what others need meanwhile either.
        """
        if self.is_inside(waits=waits):
            raise called_from_inside(what)

    def is_inside(self, *, waits: bool) -> bool:
        """Whether `check_may_enter` would raise."""
        if self._lock.is_inside():
            return True
        if len(_locks) > 1 and any(is_mine() for is_mine in _locks):
            return True  # of another group's: its lock and this one, taken in both orders
        return waits and (
            self._reading.is_mine()
            or self.arena.is_held()
            or occupied.is_mine()
            or self.holding.is_mine()
        )

    @uninterrupted
    def check_open(self) -> None:
        """Raise what new calls are refused with, if they are."""
        with self._lock.asked():
            if self._turns.closed is not None:
                raise self._turns.closed()

    @uninterrupted
    def has_room(self) -> bool:
        """Whether `submit` would take a call without blocking."""
        with self._lock.asked():
            return self._turns.closed is not None or not self._turns.is_full

    def submit(self, call: Call, *, waits: bool, at_once: bool = False) -> None:
        """Accept *call*: send it, or let it wait for its turn.

        With *waits* the caller will wait for the call itself, so it may queue at once, as it may
        with *at_once*; otherwise this blocks, up to the call's deadline, while too many calls wait
        for their turn.

        Raises:
            ExecutorClosed: nothing is accepted any more.
            SpecError: it was made for another size, or for a rank that is no more.
            CallTimeout: no place became free; nothing was sent.
        """
        if call.tap is not None:
            call.tap.issued(call)
        deadline = call.terms.deadline
        while (place := self._accept(call, waits, at_once)) is not None:
            came = False
            try:
                self.check_may_enter(call.name, waits=True)
                came = self._reading.wait(place, deadline)
            finally:
                if not came:
                    with self._lock.asked():
                        self._turns.give_up(place)
                    call.drop()
            if not came:
                raise call.timed_out()

    @uninterrupted
    def _accept(self, call: Call, waits: bool, at_once: bool) -> Ticket | None:
        """Send *call* or queue it, and return None; or return a ticket for a place in the queue."""
        with self._lock.unasked:
            closed = self._turns.closed
            size = self._turns.size
            if closed is None and call.fits(size):
                if not (waits or at_once) and self._turns.is_full:
                    return self._turns.ask_for_a_place()
                if self.arena.is_warm:
                    self._trimming.later()
                self._turns.add(call)
                self._sending.pump()
                if not waits:
                    self._reading.see_to_it()
                return None
        call.drop()
        if closed is not None:
            raise closed()
        raise call.misfit(size)

    @uninterrupted
    def insert(self, call: Call, *, first: bool = False) -> None:
        """Accept *call*, one of our own, however many wait; ahead of them if it is to be *first*.

        Raises:
            ExecutorClosed: nothing is accepted any more.
        """
        with self._lock.asked():
            closed = self._turns.closed
            if closed is None:
                if first:
                    self._turns.everyone.appendleft(call)
                else:
                    self._turns.add(call)
                self._sending.pump()
                self._reading.see_to_it()
                return
        call.drop()
        raise closed()

    def wait(self, call: Call, deadline: float | None) -> bool:
        """Return True once *call* is done, False at *deadline*."""
        return self._reading.wait(call, deadline)

    @uninterrupted
    def expire(self, call: Call) -> dict[int, int]:
        """Settle *call* as timed out, unless it is done; return who owes it (rank: incarnation)."""
        with self._lock.asked():
            if call.done:
                return {}
            late = {
                seat.rank: seat.incarnation
                for seat in self._seats
                if seat.sent.get(call.wire) is call
            }
            self._settling.run_late(call)
            self._sending.pump()
            return late

    @uninterrupted
    def cancel(self, call: Call, cause: BaseException | None = None) -> bool:
        """Withdraw *call*, or void its answers if it has been sent; False if it is done.

        Its caller has been given *cause* instead of its outcome.
        """
        if call.tap is not None and cause is not None:
            call.tap.raised(cause)
        with self._lock.asked():
            if call.done:
                return False
            self._settling.withdraw(call, error=CancelledError())
            self._sending.pump()
            return True

    @uninterrupted
    def when_settled(self, call: Call, then: Callable[[Call], None]) -> None:
        """Run ``then(call)`` when *call* is done; on whichever thread settles it: be quick."""
        with self._lock.asked():
            if not call.done:
                self._settling.watch(call, then)
                self._reading.see_to_it()
                return
        then(call)

    def counts(self) -> dict[str, int]:
        """Return how many calls are in flight, how many wait, and how many answers were void."""
        with self._lock.asked():
            sent = {id(call) for call in self._settling.calls() if call.wire}
            return {
                "in_flight": len(sent),
                "waiting": len(self._turns),
                "dropped_replies": self._arriving.dropped,
            }

    @uninterrupted
    def seated(self) -> dict[int, Progress]:
        """Return what each rank is doing, as far as it is known without reading."""
        with self._lock.asked():
            return {seat.rank: seat.progress() for seat in self._seats}

    # --- streams ------------------------------------------------------------------------

    @uninterrupted
    def take(
        self, call: Call, wake: Callable[[], None] | None = None
    ) -> tuple[int, Frame] | Ticket | None:
        """Return the next item of *call*'s stream and its rank, or None after the last.

        Where none is there yet, a ticket that is done when there is news; or *wake* is called
        then, on whichever thread brings it.
        """
        with self._lock.asked():
            return self._taking.take(call, wake)

    def wait_for(self, ticket: Ticket) -> None:
        """Return once *ticket* is done; a call's deadline sees to that."""
        self._reading.wait(ticket, None)

    @uninterrupted
    def abandon(self, call: Call) -> None:
        """Nobody takes *call*'s items any more."""
        self.cancel(call)
        with self._lock.asked():
            assert call.stream is not None
            call.stream.items.clear()

    def abandon_later(self, call: Call) -> None:
        """The same, soon; takes no lock, so a finalizer may call it anywhere."""
        self._taking.abandon(call)
        self._reading.nudge()

    @uninterrupted
    def _on_nudge(self) -> None:
        if self._taking.has_abandoned:
            with self._lock.asked():
                for call in self._taking.abandoned():
                    self._settling.withdraw(call, error=CancelledError(GIVEN_UP))
                self._sending.pump()

    def _on_late_taker(self, call: Call) -> None:
        with self._lock.asked():
            if not self._taking.is_overdue(call):
                return
            assert call.stream is not None
            seconds = call.stream.take_within
            msg = (
                f"no item of the stream of {call.name} was taken for {seconds:g} s; it kept its "
                "ranks from serving, and was closed: close streams (`with`), or set take_within"
            )
            self._settling.withdraw(call, error=StreamNotTaken(msg))
            self._sending.pump()
        self._on_untaken(call)

    # --- under the lock -------------------------------------------------------------------

    def _refused(self, seat: Seat, wire: int, error: OSError) -> None:
        """End the call in a packet that could not be sent to *seat*, whose rank is alive."""
        call = self._seats.pay(seat, wire) if wire in seat.sent else None
        if call is not None:
            msg = f"{call.name} could not be sent to rank {seat.rank}: {error}"
            if self._cuts is not None:
                self._cuts.abandon(wire)
            self._settling.withdraw(call, error=RuntimeFault(msg))


_guard = threading.Lock()
_locks: tuple[Callable[[], bool], ...] = ()  # says of each plane's whether this thread has it


def _add(lock: OwnedLock, *, gone: bool = False) -> None:
    global _locks  # noqa: PLW0603  # who reads it takes no lock
    with _guard:
        others = tuple(each for each in _locks if each != lock.is_mine)
        _locks = others if gone else (*others, lock.is_mine)
