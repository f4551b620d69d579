"""What becomes of calls: answers come together into one outcome, once.

Guarantees: a call is settled once, whatever comes first: its last answer, an exception, its
deadline, a death, a cancel; everything later is void. What survivors raise because another rank
died counts as that death, not as their exception.

Left to others: which answers are a call's (`plane`), what a death costs (`losing`), what its
outcome means (`calls`). Everything here is under the plane's lock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.runtime import Flag, Kind

from .outcomes import Outcome, OutcomeKind
from .terms import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from phalanx.runtime import Frame, Hub, OwnedLock

    from .calls import Call
    from .reading import Reading
    from .seat import Seat, Seats
    from .sending import Sending
    from .taking import Taking
    from .turns import Turns

_DOUBT = 0.5  # seconds that an exception out of a process group waits for a death behind it
_LONGEST_DOUBT = 10.0  # the same where a rank is known to be about to end: it may take its time


class Settling:
    """Settles the calls of one group."""

    def __init__(
        self,
        hub: Hub,
        lock: OwnedLock,
        *,
        seats: Seats,
        turns: Turns,
        reading: Reading,
        taking: Taking,
        sending: Sending,
    ) -> None:
        self._hub = hub
        self._lock = lock
        self._seats = seats
        self._turns = turns
        self._reading = reading
        self._taking = taking
        self._sending = sending
        self._doubtful: dict[int, tuple[Call, set[int]]] = {}  # by wire id; who has raised

    def answer(self, call: Call, rank: int, answer: Frame | Outcome) -> None:
        """Take *rank*'s part of the outcome."""
        call.answers[rank] = answer
        if len(call.answers) == len(call.asked) and call.failed is None:
            self.settle(call)

    def hear(self, call: Call, rank: int, frame: Frame) -> None:
        """Take what *rank* has answered that is no value."""
        if frame.kind != Kind.ERROR:
            frame.drop()
        elif call.shape is Shape.GATHER:
            self.answer(call, rank, frame)
        else:
            self._refuse(call, rank, frame)

    def settle(self, call: Call, *, error: BaseException | None = None) -> None:
        """End *call* with what it has been answered, or with *error*; void if it has ended."""
        if call.done:
            return
        call.error = error
        call.done = True
        if call.tap is not None:
            call.tap.settled(call)
        if call.span is not None:
            call.span.settled(call)
        if self._doubtful:
            self._doubtful.pop(call.wire, None)
        call.drop()
        if call.timer is not None:
            call.timer.cancel()
        self._reading.wake(call)
        if call.future is not None:
            future, call.future = call.future, None  # a cycle would keep its answers
            if future.is_whole:
                future.finish()
        if call.watchers:
            self._reading.watched -= 1
            watchers, call.watchers = call.watchers, ()
            for then in watchers:
                then(call)
        if call.stream is not None:
            self._taking.end(call)

    def watch(self, call: Call, then: Callable[[Call], None]) -> None:
        """Run ``then(call)`` when *call*, which is not done, has ended."""
        if not call.watchers:
            self._reading.watched += 1
        call.watchers += (then,)

    def unwatch(self, call: Call, then: Callable[[Call], None]) -> None:
        """Take back a `watch` of a call that is not done."""
        call.watchers = tuple(each for each in call.watchers if each is not then)
        if not call.watchers:
            self._reading.watched -= 1

    def withdraw(self, call: Call, *, error: BaseException | None = None) -> None:
        """Settle *call* before it is answered, and forget it."""
        self.settle(call, error=error)
        self.forget(call)

    def forget(self, call: Call) -> None:
        """Void the answers that are still to come to *call*, and take it out of the queues."""
        if not call.wire:
            self._turns.remove(call)
            return
        for seat in self._seats:
            if call.wire in seat.sent:
                seat.sent[call.wire] = None  # it is still owed; what comes of it is void
                seat.noted[call.wire] = (call.name, call.seq, call.hang_after)

    def lose_part(
        self, call: Call, lost: Iterable[Seat], error: Callable[[Call], BaseException]
    ) -> None:
        """Have *lost* answer the gather *call* with their death."""
        for seat in lost:
            if seat.rank not in call.answers and call.wire in seat.sent:
                dead = Outcome(seat.rank, OutcomeKind.DEAD, error=error(call))
                self.answer(call, seat.rank, dead)

    def run_late(self, call: Call) -> None:
        """End *call*, whose deadline has passed."""
        if call.shape is Shape.GATHER and call.wire:
            for rank in call.missing:
                error = call.timed_out()
                call.answers[rank] = Outcome(rank, OutcomeKind.TIMEOUT, error=error)
            self.withdraw(call)
        elif call.failed is not None:
            self.withdraw(call)
        else:
            self.withdraw(call, error=call.timed_out())

    def doubted(self) -> list[Call]:
        """Return the calls whose exception waits for a death behind it."""
        return [call for call, _ in self._doubtful.values()]

    def send_again(self, calls: Iterable[Call]) -> None:
        """Take *calls* back from whom they were sent to, and put them first in the queues."""
        calls = list(calls)
        for call in calls:
            self._doubtful.pop(call.wire, None)
            self.forget(call)
        self._turns.put_back(calls)

    def calls(self) -> Iterator[Call]:
        """Every call that is not settled; some more than once."""
        for seat in self._seats:
            for call in list(seat.sent.values()):
                if call is not None and not call.done:
                    yield call
        yield from self.doubted()
        yield from self._turns

    def _refuse(self, call: Call, rank: int, frame: Frame) -> None:
        """Fail *call* with what *rank* raised, unless that may be the echo of a death.

        A killed rank's connections close before its process is seen to end: in three of eight
        kills (gloo, four ranks) a survivor's "connection closed by peer" was here first. It would
        have passed for the survivor's own exception, and a call to be retried would have failed.
        Where every rank has raised, none of them has died of it.
        """
        if call.failed is None:
            call.failed = (frame, rank)
        if call.shape is not Shape.COLLECTIVE or not frame.flags & Flag.JOINED:
            self.withdraw(call)
            return
        wire = call.wire
        _, raised = self._doubtful.setdefault(wire, (call, set()))
        raised.add(rank)
        if len(raised) == len(self._seats):
            self.withdraw(call)
        elif len(raised) == 1:
            self._doubt(call, wire, time.monotonic() + _LONGEST_DOUBT)

    def _doubt(self, call: Call, wire: int, longest: float) -> None:
        at = time.monotonic() + _DOUBT
        self._hub.call_at(at, lambda: self._end_doubt(call, wire, longest))

    def _end_doubt(self, call: Call, wire: int, longest: float) -> None:
        with self._lock:
            if wire not in self._doubtful or call.done:
                return
            ending = any(seat.ended or seat.ending for seat in self._seats)
            if ending and time.monotonic() < longest:
                # A rank has closed its end, or said good-bye, and lives on: its death is coming.
                self._doubt(call, wire, longest)
                return
            self.withdraw(call)
            self._sending.pump()
