"""Receives replies, matches them to calls, and settles each call once.

How answers come in: read from whoever has something, each matched to the sending it answers.

Guarantees: an answer is matched by the id of the very sending it belongs to, and by the
incarnation it comes from; anything else is dropped and counted. What a dead rank wrote is read to
its end.

Left to others: who reads, and when (`reading`), what an answer means for its call (`settling`).
Everything here but `on_ready` is under the plane's lock.

What becomes of calls: answers come together into one outcome, once.

Guarantees: a call is settled once, whatever comes first: its last answer, an exception, its
deadline, a death, a cancel; everything later is void. What survivors raise because another rank
died counts as that death, not as their exception. In a process group a call that some ranks have
left by an exception, while others are inside of it, is followed by no other before those have left
it as well, or the group has been formed anew.

How: a worker whose method raised in a process group waits for `Kind.GO_ON` (it would meet the
others one call off: they may wait for it in an operation that it never began). Here the calls
behind that one are withdrawn. Once no rank is inside of it the worker goes on; where one stays, or
the process group itself is broken, the group's actor is told, which has it formed anew.

Left to others: which answers are a call's (`plane`), what a death costs (`losing`), what its
outcome means (`calls`). Everything here is under the plane's lock.
"""

from __future__ import annotations

import select
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.actors.signals.interrupts import uninterrupted
from phalanx.actors.spec.results import Outcome, OutcomeKind
from phalanx.runtime import Arrival, FarFrame, Flag, Frame, Kind, RemoteFailure

from .call import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from phalanx.actors.checkpoint.coordinator import Cuts
    from phalanx.runtime import Hub, OwnedLock

    from .call import Call
    from .queue import Turns
    from .rank import Seat, Seats
    from .reader import Events, Reading
    from .sending import Sending
    from .streams import Taking


_GRACE = 0.5  # seconds for the other ranks to leave the call too, or for news of a death behind it
_LONGEST_GRACE = 10.0  # the same where a rank is known to be about to end: it may take its time
_WHY = Flag.HELD | Flag.BROKEN


@dataclass(slots=True)
class _Split:
    """A call that some ranks have left by an exception.

    Attributes:
        call: It; None where it had been settled before.
        error: The first exception, as it came.
        rank: Who raised that.
        raised: Who has raised.
        held: Those of them, by rank and incarnation, that wait for `Kind.GO_ON`.
        broken: The first exception that says that the process group is broken, and whose it is.
        since: When it began, or a split before it ended.
        longest: When its grace ends at the latest.
        keeps_back: Whether the calls behind it are kept back.
    """

    call: Call | None
    error: Frame
    rank: int
    since: float
    longest: float
    raised: set[int] = field(default_factory=set[int])
    held: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    broken: tuple[Frame, int] | None = None
    keeps_back: bool = False


@dataclass(frozen=True, slots=True)
class Discord:
    """Why the ranks of a group cannot go on together.

    Attributes:
        why: The same, for people.
        rank: Whose end lets the group be formed anew.
        is_stuck: Whether that rank is inside of a call.
    """

    why: str
    rank: int
    incarnation: int
    is_stuck: bool


class Settling:
    """Settles the calls of one group.

    Args:
        on_split: Told the number of a sending after which the group cannot go on; runs under the
            lock.
    """

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
        cuts: Cuts | None,
        on_split: Callable[[int], None],
    ) -> None:
        self._hub = hub
        self._lock = lock
        self._seats = seats
        self._turns = turns
        self._reading = reading
        self._taking = taking
        self._sending = sending
        self._cuts = cuts
        self._on_split = on_split
        self._splits: dict[int, _Split] = {}  # by wire id

    def answer(self, call: Call, rank: int, answer: Frame | Outcome) -> None:
        """Take *rank*'s part of the outcome."""
        call.answers[rank] = answer
        if len(call.answers) == len(call.asked) and call.failed is None:
            self.settle(call)

    def hear(self, call: Call, seat: Seat, frame: Frame) -> None:
        """Take what *seat* has answered that is no value."""
        if frame.kind != Kind.ERROR:
            frame.drop()
            return
        self.note(call, seat, frame)
        if call.shape is Shape.GATHER:
            self.answer(call, seat.rank, frame)
        else:
            self._refuse(call, seat.rank, frame)
        self._look(frame.call_id)

    def hear_late(self, seat: Seat, frame: Frame) -> None:
        """Take what *seat* has answered to a call that is settled."""
        if frame.kind == Kind.ERROR:
            self.note(None, seat, frame)
        if self._splits:
            self._look(frame.call_id)

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
        if self._splits:
            self._look(call.wire)

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

    def doubted(self, lost: Sequence[Seat] | None) -> list[Call]:
        """Return the calls whose exception the death of the first of *lost* explains.

        Those that it does not explain are settled: what the dead one has raised itself, and all of
        them without a death.
        """
        explained: list[Call] = []
        for split in tuple(self._splits.values()):
            call = split.call
            if call is None or call.done or call.failed is None:
                continue
            if lost and lost[0].rank not in split.raised:
                explained.append(call)
            else:
                self.withdraw(call)
        return explained

    def send_again(self, calls: Iterable[Call]) -> None:
        """Take *calls* back from whom they were sent to, and put them first in the queues."""
        calls = list(calls)
        for call in calls:
            self.forget(call)
        self._turns.put_back(calls)

    def calls(self) -> Iterator[Call]:
        """Every call that is not settled; some more than once."""
        for seat in self._seats:
            for call in list(seat.sent.values()):
                if call is not None and not call.done:
                    yield call
        for split in tuple(self._splits.values()):
            if split.call is not None and not split.call.done:
                yield split.call
        yield from self._turns

    def _refuse(self, call: Call, rank: int, frame: Frame) -> None:
        """Fail *call* with what *rank* raised, unless that may be the echo of a death.

        A killed rank's connections close before its process is seen to end: in three of eight
        kills (gloo, four ranks) a survivor's "connection closed by peer" was here first. It would
        have passed for the survivor's own exception, and a call to be retried would have failed.
        Where every rank has raised, none of them has died of it.
        """
        may_be_echo = bool(frame.flags & Flag.BROKEN) and call.shape is Shape.COLLECTIVE
        if call.failed is None or not may_be_echo:
            call.failed = (frame, rank)
        split = self._splits.get(call.wire)
        if not may_be_echo or split is None or len(split.raised) == len(self._seats):
            self.withdraw(call)

    # --- ranks out of step ------------------------------------------------------------------

    def note(self, call: Call | None, seat: Seat, frame: Frame) -> None:
        """Note that *seat* has left a call, *call* if it is not settled, by an exception."""
        why = frame.flags & _WHY
        if not why:
            return
        wire, who = frame.call_id, (seat.rank, seat.incarnation)
        if seat.leaving:  # the group is being formed anew already
            if why & Flag.HELD:
                self._sending.say(seat, Kind.GO_ON, wire)
            return
        split = self._splits.get(wire)
        if split is None:
            now = time.monotonic()
            split = _Split(call, frame, seat.rank, now, now + _LONGEST_GRACE)
            self._splits[wire] = split
            if self._inside(wire):
                self._keep_back(split, wire)
        split.raised.add(seat.rank)
        if why & Flag.HELD:
            split.held.add(who)
        if why & Flag.BROKEN and split.broken is None:
            split.broken = (frame, seat.rank)
        if not split.keeps_back and split.broken:
            self._keep_back(split, wire)

    def out_of_step(self, wire: int) -> Discord | None:
        """Return what follows from the split since *wire*, if it lasts; end it, if it does not."""
        split = self._splits.get(wire)
        if split is None:
            return None
        name = "an earlier call" if split.call is None else repr(split.call.name)
        if split.broken is not None:
            frame, rank = split.broken
            why = f"the process group is broken: rank {rank} raised {_headline(frame)} in {name}"
            if split.rank != rank:
                why += f", where rank {split.rank} had raised {_type_name(split.error)}"
            seat = self._seats.at(rank)
            stuck = False
        else:
            inside = self._inside(wire)
            if not inside:
                self._look(wire)
                self._sending.pump()
                return None
            seat, stuck = inside[0], True
            others = "rank" if len(inside) == 1 else "ranks"
            ranks = ", ".join(str(each.rank) for each in inside)
            why = (
                f"the ranks are out of step: rank {split.rank} raised {_type_name(split.error)} "
                f"in {name}, {others} {ranks} had not ended it after {_GRACE:g} s"
            )
        if seat is None or seat.ended:
            self._wait(wire)  # its death is coming, and ends this
            return None
        return Discord(why, seat.rank, seat.incarnation, stuck)

    def let_go(self, seat: Seat) -> None:
        """Have *seat*, which is to leave its process group, heed what it is told next."""
        seat.leaving = True
        who = (seat.rank, seat.incarnation)
        for wire, split in self._splits.items():
            if who in split.held:
                split.held.discard(who)
                self._sending.say(seat, Kind.GO_ON, wire)

    def outlive(self) -> None:
        """After a death, end the splits that it has ended, or that it explains."""
        for wire, split in tuple(self._splits.items()):
            if split.broken is not None or not self._inside(wire):
                self._end_split(wire)

    def begin_epoch(self) -> None:
        """Note that the ranks that were told to leave their process group are in the next one."""
        for seat in self._seats:
            if seat.leaving:
                seat.leaving = False
                for wire in tuple(self._splits):
                    self._end_split(wire)

    def _inside(self, wire: int) -> list[Seat]:
        """Return who may still be inside of the call *wire*."""
        return [seat for seat in self._seats if not seat.has_left(wire)]

    def _keep_back(self, split: _Split, wire: int) -> None:
        """Send nothing more, and take back what no rank has begun, while *split* lasts."""
        split.keeps_back = True
        self._sending.holds += 1
        reached = self._sending.withdraw_unbegun()
        behind: dict[int, Call] = {}
        for seat in self._seats:
            for number, call in seat.sent.items():
                if call is None or call.done or number <= reached:
                    continue
                if call.shape is Shape.COLLECTIVE:
                    behind[number] = call
        if self._cuts is not None:
            for number in behind:
                self._cuts.abandon(number)
        self.send_again(behind.values())
        self._wait(wire)

    def _look(self, wire: int) -> None:
        """End the split since *wire* if every rank has left that call in good order."""
        split = self._splits.get(wire)
        if split is None or self._inside(wire):
            return
        if split.broken is None:
            self._end_split(wire)
        elif len(split.raised) == len(self._seats):
            self._on_split(wire)  # none of them has died of it: there is nothing to wait for

    def _end_split(self, wire: int) -> None:
        """Have those that were held go on behind the call *wire*."""
        split = self._splits.pop(wire)
        for rank, incarnation in split.held:
            seat = self._seats.find(rank, incarnation)
            if seat is not None and not seat.ended:
                self._sending.say(seat, Kind.GO_ON, wire)
        if split.keeps_back:
            self._sending.holds -= 1
        now = time.monotonic()
        for other in self._splits.values():
            other.since = now  # who was held could not come to that one before

    def _wait(self, wire: int, at: float | None = None) -> None:
        when = time.monotonic() + _GRACE if at is None else at
        self._hub.call_at(when, lambda: self._end_grace(wire))

    def _end_grace(self, wire: int) -> None:
        with self._lock.asked():
            split = self._splits.get(wire)
            if split is None:
                return
            if not self._seats.by_rank:  # the group has ended
                self._splits.clear()
                return
            now = time.monotonic()
            ending = any(seat.ended or seat.ending for seat in self._seats)
            if ending and now < split.longest:
                # A rank has closed its end, or said good-bye, and lives on: its death is coming.
                self._wait(wire)
                return
            if split.call is not None and not split.call.done and split.call.failed is not None:
                self.withdraw(split.call)
            # Who has not come to that call is in an earlier one, which has nothing to do with it.
            late = [
                max(split.since, seat.channel.board.begun_at) + _GRACE
                for seat in self._inside(wire)
                if seat.has_begun(wire)
            ]
            due = min(late, default=now + _GRACE)
            if split.broken is not None or due <= now:
                self._on_split(wire)
                due = now + _GRACE
            else:
                self._look(wire)
            if wire in self._splits:
                self._wait(wire, due)
            self._sending.pump()


def _type_name(frame: Frame) -> str:
    """Return the type of the exception in *frame*, as far as it is known without taking that."""
    failure = _read(frame)
    return "an exception" if failure is None else failure.type_name


def _headline(frame: Frame) -> str:
    failure = _read(frame)
    return "an exception" if failure is None else failure.headline


def _read(frame: Frame) -> RemoteFailure | None:
    return None if isinstance(frame, FarFrame) else RemoteFailure.read(frame)


class Arriving:
    """The reading end of a group.

    Args:
        on_end: Told (rank, incarnation) when a rank's stream ends; runs under no lock.
        on_foreign: Told the rank whose channel brought something that is no message, once for
            each incarnation.

    Attributes:
        dropped: How many answers were void, and packets foreign.
    """

    def __init__(
        self,
        lock: OwnedLock,
        *,
        seats: Seats,
        reading: Reading,
        sending: Sending,
        taking: Taking,
        settling: Settling,
        cuts: Cuts | None,
        on_end: Callable[[int, int], None],
        on_foreign: Callable[[int], None],
    ) -> None:
        self._lock = lock
        self._seats = seats
        self._on_end = on_end
        self._on_foreign = on_foreign
        self.dropped = 0
        self._reading = reading
        self._sending = sending
        self._taking = taking
        self._settling = settling
        self._cuts = cuts

    @uninterrupted
    def on_ready(self, events: Events) -> None:
        """Act on what epoll says; on whichever thread reads."""
        ended: list[Seat] = []
        with self._lock.unasked:
            reading = self._seats.reading
            for fd, event in events:
                seat = reading(fd)
                if seat is None:
                    continue
                if event & _WRITABLE:
                    self._sending.flush(seat)
                if event & ~_WRITABLE and not self._read(seat):
                    seat.ended = True
                    self.stop(seat)
                    ended.append(seat)
            self._sending.go_on()
        for seat in ended:
            self._on_end(seat.rank, seat.incarnation)

    def drain(self, seat: Seat) -> None:
        """Read everything that *seat* has written."""
        while not seat.ended:
            frame = seat.channel.receive()
            if isinstance(frame, Frame):
                self._arrive(seat, frame)
            elif frame is _FOREIGN:
                self.drop_foreign(seat)
            else:
                break
        self._sending.go_on()

    def stop(self, seat: Seat) -> None:
        """Read *seat* no longer."""
        if self._seats.unread(seat):
            self._reading.remove(seat.channel.fileno())

    def _read(self, seat: Seat) -> bool:
        """Read what is there and act on it; return False at the end of the stream."""
        receive = seat.channel.receive
        sent = seat.sent
        while True:
            frame = receive()
            if isinstance(frame, Frame):
                self._arrive(seat, frame)
            elif frame is _FOREIGN:
                self.drop_foreign(seat)
            else:
                return frame is _NOTHING
            if not sent:
                return True  # it owes no answer: asking once more would cost and find nothing

    def drop_foreign(self, seat: Seat, packets: int = 1) -> None:
        """Count so many *packets* of *seat*'s that are no messages; tell of the first."""
        self.dropped += packets
        if not seat.foreign:
            seat.foreign = True
            self._on_foreign(seat.rank)

    def _arrive(self, seat: Seat, frame: Frame) -> None:
        wire = frame.call_id
        sent = seat.sent
        if wire not in sent or frame.incarnation != seat.incarnation:
            frame.drop()
            self.dropped += 1
            return
        kind = frame.kind
        if self._cuts is not None and kind != _ITEM:
            if kind in (Kind.SAVED, Kind.NOT_SAVED):
                if kind == Kind.NOT_SAVED:
                    self._settling.note(sent[wire], seat, frame)
                self._cuts.hear(seat.rank, frame)
                return
            self._cuts.answered(seat.rank, wire)
        call = sent[wire] if kind == _ITEM else self._seats.pay(seat, wire)
        if call is None or call.done or call.wire != wire:
            self._settling.hear_late(seat, frame)
            frame.drop()  # it was settled without this answer
            self.dropped += 1
        elif kind == _REPLY:
            # Of a row of calls thousands may lie there, for whoever asks: they share one.
            self._settling.answer(call, seat.rank, frame if frame.body else _NO_VALUE)
        elif kind == _ITEM:
            self._taking.keep(call, seat.rank, frame)
        else:
            self._settling.hear(call, seat, frame)


_REPLY = Kind.REPLY
_NO_VALUE = Frame(_REPLY, 0, 0, 0, 0, 0, b"")
_ITEM = Kind.ITEM
_NOTHING = Arrival.NOTHING  # to look a member of an enum up takes as long as a call
_FOREIGN = Arrival.FOREIGN
_WRITABLE = select.EPOLLOUT
