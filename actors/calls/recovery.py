"""Ranks come and go: what that costs the calls in flight.

Who sits in a group: incarnations come, say how far they are, and leave; what that costs calls.

Guarantees: a rank that wrote its answer before it died has answered: `lose` reads to the end first;
calls that no rank had begun when a death came are sent again, in order, at no cost; after `end`
no call is left without an outcome.

Left to others: when ranks come and go (`executor_actor`), which of their calls a death costs what
(`losing`), the calls themselves (`plane`). The lock is the plane's.

What a death costs the calls that were under way. Decides; changes nothing.

Guarantees: each call gets one verdict. A call that no rank had begun is sent again at no cost; one
that had begun costs an attempt, or ends; a gather loses the dead ranks' parts only, and as a whole
is a call that no rank had begun where nobody is left who could begin it.

Left to others: reading what the dead had written, and keeping survivors from beginning more
(`plane`), doing what is decided (`settling`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.runtime import CallFate, Fate

from .call import Shape
from .rank import Progress, Running, Seat, Seats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx.actors.checkpoint.coordinator import Cuts
    from phalanx.actors.spec.adaptive_spin import Spinning
    from phalanx.runtime import Channel, CrashReport, OwnedLock

    from .call import Call
    from .queue import Turns
    from .reader import Reading
    from .receiving import Arriving, Discord, Settling
    from .sending import Sending


@dataclass(frozen=True, slots=True)
class Loss:
    """The verdicts.

    Attributes:
        parts: Gathers that lose the parts of the ranks that were lost.
        begun: Calls that a rank had begun, which costs an attempt or, without any, ends them.
        untouched: Calls that no rank had begun.
    """

    parts: list[Call] = field(default_factory=list["Call"])
    begun: list[Call] = field(default_factory=list["Call"])
    untouched: list[Call] = field(default_factory=list["Call"])

    def fates(self, waiting: Iterable[Call] = (), *, ends: bool = False) -> tuple[CallFate, ...]:
        """Return what becomes of each call, for the crash report, oldest first.

        Where the group *ends*, nothing is sent again, and those *waiting* for their turn fail too.
        """
        told = [_fate(call, Fate.KEPT, begun=True) for call in self.parts]
        for calls, begun in ((self.begun, True), (self.untouched, False)):
            for call in calls:
                again = not ends and (call.retries > 0 or not begun)
                fate = Fate.SENT_AGAIN if again else Fate.FAILED
                told.append(_fate(call, fate, begun=begun))
        if ends:
            told += [_fate(call, Fate.FAILED, begun=False) for call in waiting]
        return tuple(sorted(told, key=lambda each: each.call_id))

    def tell_spans(self, report: CrashReport, fates: Iterable[CallFate]) -> None:
        """Tell the spans of calls, where somebody traces, of the death and of what follows."""
        traced = [call for call in (*self.parts, *self.begun, *self.untouched) if call.span]
        by_call = {each.call_id: each for each in fates} if traced else {}
        for call in traced:
            assert call.span is not None
            call.span.died(report, by_call.get(call.seq))


def assess(
    lost: Sequence[Seat], survivors: Sequence[Seat], doubted: Iterable[Call], reached: int
) -> Loss:
    """Return what losing *lost* means for each call, in the order of their sending.

    Args:
        lost: The ranks, whose answers have been read to the end.
        survivors: The others.
        doubted: Calls whose exception this death explains.
        reached: The last collective call that any rank has begun; none begins a later one.
    """
    touched = {call.wire: call for call in doubted}
    for seat in lost:
        for call in seat.sent.values():
            if call is not None and not call.done:
                touched[call.wire] = call
    # Withdrawn from the survivors with the others: what no rank had begun.
    for seat in survivors:
        for wire, call in seat.sent.items():
            if call is not None and call.shape is Shape.COLLECTIVE and wire > reached:
                touched[call.wire] = call
    loss = Loss()
    for wire in sorted(touched):
        call = touched[wire]
        if call.shape is Shape.GATHER:
            whole = wire > reached and not any(wire in seat.sent for seat in survivors)
            (loss.untouched if whole else loss.parts).append(call)
        elif _has_begun(call, lost, reached):
            loss.begun.append(call)
        else:
            loss.untouched.append(call)
    return loss


def _fate(call: Call, fate: Fate, *, begun: bool) -> CallFate:
    left = max(0, call.retries - begun) if fate is Fate.SENT_AGAIN else 0
    return CallFate(method=call.name, call_id=call.seq, fate=fate, begun=begun, retries_left=left)


def _has_begun(call: Call, lost: Iterable[Seat], reached: int) -> bool:
    if call.shape is not Shape.COLLECTIVE:
        return any(seat.has_begun(call.wire) for seat in lost)
    # A rank that has answered may have died since: its page is gone, its answer is not.
    return call.wire <= reached or bool(call.answers) or call.failed is not None


class Seating:
    """The coming and going of one group's ranks."""

    def __init__(
        self,
        lock: OwnedLock,
        *,
        seats: Seats,
        turns: Turns,
        reading: Reading,
        sending: Sending,
        settling: Settling,
        arriving: Arriving,
        cuts: Cuts | None,
        spinning: Spinning,
    ) -> None:
        self._lock = lock
        self._seats = seats
        self._turns = turns
        self._reading = reading
        self._sending = sending
        self._settling = settling
        self._arriving = arriving
        self._cuts = cuts
        self._spinning = spinning

    def expect(self, size: int, show: Callable[[], None]) -> None:
        """Take only calls that *size* ranks can answer, and fail those that wait and need others.

        The seats follow in `resize`, once the ranks beyond are gone. *show* publishes the new size,
        under the lock: before any call ends for it, and not before one can be made for it.
        """
        with self._lock.asked():
            misfits = self._turns.expect(size)
            show()
            for call in misfits:
                self._settling.settle(call, error=call.misfit(size))
            self._turns.admit(self._reading.wake)

    def resize(self, size: int) -> None:
        """Have *size* seats; those beyond must be empty."""
        with self._lock.asked():
            self._seats.resize(size)

    def join(self, rank: int, incarnation: int, channel: Channel) -> None:
        """Seat a new incarnation; from here on it may be sent calls of its own."""
        with self._lock.asked():
            channel.board.enter(self._sending.round)
            limit = None if self._cuts is None else self._cuts.limit
            self._seats.take(Seat(rank, incarnation, channel, saving_limit=limit))
            self._reading.add(channel.fileno())
            self._sending.pump()
            self._reading.see_to_it()

    def open(self, epoch: int) -> None:
        """Every seat is taken: let collective calls go, under *epoch*."""
        looks = self._spinning.of(len(self._seats))
        with self._lock.asked():
            self._reading.spin = looks.caller
            for seat in self._seats:
                seat.channel.board.let_spin(looks.ranks)
            self._settling.begin_epoch()
            self._sending.epoch = epoch
            self._sending.whole = True
            self._sending.pump()
            self._reading.see_to_it()  # nobody may be waiting for what has just been sent

    def count_foreign(self, rank: int, incarnation: int, packets: int) -> None:
        """Count *packets* that a rank has sent beside its answers and that are no messages."""
        with self._lock.asked():
            seat = self._seats.find(rank, incarnation)
            if seat is not None:
                self._arriving.drop_foreign(seat, packets)

    def expect_end(self, rank: int, incarnation: int) -> None:
        """Note that an incarnation is about to end, so what the others raise may be its echo."""
        with self._lock.asked():
            seat = self._seats.find(rank, incarnation)
            if seat is not None:
                seat.ending = True

    def hold(self) -> None:
        """Keep collective calls back until `open`."""
        with self._lock.asked():
            self._sending.whole = False

    def progress(self, rank: int, incarnation: int) -> Progress:
        """Read what *rank* has written, to the end, and return what it was doing."""
        with self._lock.asked():
            seat = self._seats.find(rank, incarnation)
            if seat is None:
                return Progress()
            self._sending.whole = False  # before its answers make room for further calls
            self._arriving.drain(seat)
            return seat.progress()

    def out_of_step(self, wire: int) -> Discord | None:
        """Return what keeps the ranks out of step since the call *wire*, if anything still does.

        What they have written is read first.
        """
        with self._lock.asked():
            for seat in self._seats:
                self._arriving.drain(seat)
            return self._settling.out_of_step(wire)

    def running(self) -> list[Running]:
        """Return the ranks that owe answers, once what they have written has been read.

        Where there are none, `on_busy` will tell when there are again.
        """
        with self._lock.asked():
            found: list[Running] = []
            for seat in self._seats:
                owed = len(seat.sent)
                if owed:
                    self._arriving.drain(seat)
                    found.append(seat.running(spoke=len(seat.sent) != owed))
            self._sending.watched = bool(found)
            return found

    def lose(
        self,
        ranks: dict[int, int],
        story: Callable[[tuple[CallFate, ...], int], CrashReport] | None,
        error: Callable[[Call], BaseException],
        *,
        ends: bool = False,
    ) -> None:
        """Settle or send again what was under way on *ranks* (rank to incarnation).

        What they had begun costs an attempt, or ends in *error*. They are dead, or are about to be
        stopped. Their sockets are given back only by `leave`, since one that is being stopped may
        still be writing.

        Args:
            ranks: Who is lost.
            story: Given what becomes of calls, and how many more wait for their turn, returns the
                report that is kept for each attempt; None where a stop was asked for. Called under
                the lock, before anybody hears of the death.
            error: Returns what a call ends in, after *story*.
            ends: Whether the group will not serve again.
        """
        settling = self._settling
        with self._lock.asked():
            lost = [
                seat
                for rank, incarnation in ranks.items()
                if (seat := self._seats.find(rank, incarnation)) is not None
            ]
            self._sending.whole = False  # before their answers make room for further calls
            for seat in lost:
                self._arriving.drain(seat)
            survivors = [seat for seat in self._seats if seat not in lost]
            if self._cuts is not None:
                self._cuts.lose([seat.rank for seat in lost], everybody=not survivors)
            # A stop that was asked for explains no exception.
            doubted = settling.doubted(None if story is None else lost)
            loss = assess(lost, survivors, doubted, self._sending.withdraw_unbegun(lost))
            report = None
            if story is not None:
                fates = loss.fates(self._turns, ends=ends)
                report = story(fates, 0 if ends else len(self._turns))
                loss.tell_spans(report, fates)
            for call in loss.parts:
                settling.lose_part(call, lost, error)
            again = list(loss.untouched)
            for call in loss.begun:
                if report is not None:
                    call.reports += (report,)
                if call.retries > 0:
                    call.retries -= 1
                    again.append(call)
                else:
                    settling.settle(call, error=error(call))
            settling.send_again(again)
            for seat in lost:
                self._seats.write_off(seat)
                seat.ended = True
                self._arriving.stop(seat)
            settling.outlive()
            self._sending.pump()
            self._reading.see_to_it()
            self._seats.tell_idle()

    def leave(self, rank: int, incarnation: int) -> None:
        """Free the seat of an incarnation that is gone, after `lose`."""
        with self._lock.asked():
            seat = self._seats.find(rank, incarnation)
            if seat is not None:
                self._seats.leave(seat)
                self._arriving.stop(seat)
                seat.channel.close()

    def end(
        self, error: Callable[[Call], BaseException], closed: Callable[[], BaseException]
    ) -> None:
        """Settle every call that is left, and refuse new ones with *closed*."""
        with self._lock.asked():
            self._turns.closed = closed
            left = {id(call): call for call in self._settling.calls()}
            for call in left.values():
                self._settling.settle(call, error=error(call))
            self._turns.clear()
            self._turns.admit(self._reading.wake, everyone=True)
            self._seats.tell_idle()

    def post(self, rank: int, incarnation: int, packet: bytes) -> None:
        """Queue *packet* behind the calls that *rank* has been sent."""
        with self._lock.asked():
            seat = self._seats.find(rank, incarnation)
            if seat is not None and not seat.ended:
                self._sending.transmit(seat, packet)

    def reform(self, rank: int, incarnation: int, order: bytes) -> None:
        """Have *rank* leave its process group behind what it has been sent, as *order* says."""
        with self._lock.asked():
            seat = self._seats.find(rank, incarnation)
            if seat is not None and not seat.ended:
                self._settling.let_go(seat)
                self._sending.transmit(seat, order)
