"""How calls leave: in their turn, each to all of its ranks at once, under one number.

Guarantees: a call leaves once all of its ranks have room for it, so it has a slot on every one
before its first byte goes out; a sending has a number of its own, higher than every one before
it and the same on all ranks; a message is encoded once, however many ranks get it. Of calls in a
row those for which every rank has plenty to do before are kept for a moment, and leave in one
packet: long before any rank runs out of calls, and at the latest when somebody begins to read.

Left to others: the order of the queues (`turns`), who waits for answers (`reading`). Everything
here is under the plane's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from phalanx.runtime import (
    BUNDLE_LIMIT,
    EVERY_RANK,
    Flag,
    Kind,
    Payload,
    bundle,
    call_id_of,
    call_packet,
    withdraw,
)

from .call import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from phalanx.actors.checkpoint.coordinator import Cuts

    from .call import Call
    from .queue import Turns
    from .rank import Seat, Seats
    from .reader import Reading

_NOTHING = Payload.of(None)
_PLENTY: Final = 16  # calls that a rank has been sent and not answered before more are kept
_ROW: Final = 16  # calls that are kept at most


class Sending:
    """The sending end of a group.

    Args:
        depth: Calls that one rank may have been sent and not answered.
        on_refused: Told of a call that could not be sent to a rank which is alive.
        on_busy: Told that ranks owe answers again, and of each call with a limit, which it is
            given.

    Attributes:
        epoch: The epoch that calls are sent under.
        round: How often calls have been withdrawn (`runtime.board`).
        watched: Whether *on_busy* has been told that ranks owe answers.
        whole: Whether collective calls may leave: every seat is taken, under one epoch.
        holds: How many keep new calls back (`holding`, `settling`).
        kept: Packets for all ranks that have not been sent yet, in order.
    """

    def __init__(
        self,
        seats: Seats,
        turns: Turns,
        reading: Reading,
        *,
        depth: int,
        cuts: Cuts | None,
        on_refused: Callable[[Seat, int, OSError], None],
        on_busy: Callable[[float | None], None],
    ) -> None:
        self._seats = seats
        self._turns = turns
        self._reading = reading
        self._depth = depth
        self._cuts = cuts
        self._on_refused = on_refused
        self._on_busy = on_busy
        self._wire = 0
        self.epoch = 0
        self.round = 0
        self.watched = False
        self.whole = False
        self.holds = 0
        self.kept: list[bytes] = []
        self._kept_bytes = 0
        self._reached = 0  # the last call begun by any rank, those that are gone included

    # --- whose turn it is -----------------------------------------------------------------

    def pump(self) -> None:
        """Send what may be sent, in order."""
        turns = self._turns
        everyone = turns.everyone
        if self.holds:
            # One of our own, which does not wait for the end of a hold.
            if everyone and everyone[0].under_hold and self.whole:
                seats = self._seats.all
                if _have_room(seats, self._depth):
                    self._send(everyone.popleft(), seats)
            return
        if everyone and self.whole:
            seats = self._seats.all
            depth = self._depth
            while everyone and _have_room(seats, depth):
                # One that came first and waits for a rank takes the room there first.
                if turns.alone and self._pump_alone(before=everyone[0].seq):
                    continue
                self._send(everyone.popleft(), seats)
        # Calls of one rank overtake collective ones only while those wait for a restart.
        if turns.alone:
            self._pump_alone(before=everyone[0].seq if self.whole and everyone else None)
        if turns.pool and not (self.whole and everyone):
            self._pump_pool()
        if turns.waiting:
            turns.admit(self._reading.wake)

    def go_on(self) -> None:
        """Send what waited for answers, some of which have come."""
        turns = self._turns
        if turns.everyone or turns.pool or turns.alone:
            self.pump()
        if self.kept and not _are_busy(self._seats.all, _PLENTY // 2 + len(self.kept)):
            self.send_kept()

    def _pump_alone(self, *, before: int | None) -> int:
        """Send calls for one rank, those made *before* that one; return how many were sent."""
        turns = self._turns
        sent = 0
        for rank in list(turns.alone):
            seat = self._seats.at(rank)
            while seat is not None and rank in turns.alone and seat.has_room(self._depth):
                if before is not None and turns.alone[rank][0].seq > before:
                    break
                self._send(turns.next_for(rank), (seat,))
                sent += 1
        return sent

    def _pump_pool(self) -> None:
        turns = self._turns
        for seat in self._seats:
            if not turns.pool:
                break
            if not seat.ended and not seat.sent:
                self._send(turns.pool.popleft(), (seat,))

    # --- sending --------------------------------------------------------------------------

    def _send(self, call: Call, seats: Sequence[Seat]) -> None:
        self._wire = wire = call.wire = self._wire + 1
        shape = call.shape
        flags = Flag.NONE
        if shape is _COLLECTIVE:
            flags = Flag.COLLECTIVE
        elif shape is Shape.POOL:
            call.rank = seats[0].rank
        if call.terms.tell:
            flags |= Flag.TELL
        if call.stream is not None:
            flags |= Flag.STREAM
        group = self._seats
        call.asked = group.ranks if seats is group.all else tuple([seat.rank for seat in seats])
        group.owe(seats, wire, call)
        if call.tap is not None:
            call.tap.before_send(call, self.epoch, tuple((s.rank, s.incarnation) for s in seats))
        payloads = call.payloads
        limit = call.hang_after
        marked: Collection[int] = ()
        if self._cuts is not None:
            marked = self._cuts.mark(call, call.asked, len(self._seats))
            if marked and self._cuts.limit is not None:
                limit = self._cuts.limit if limit is None else min(limit, self._cuts.limit)
            if len(marked) == len(seats):
                flags |= Flag.MARKED
        if marked and len(marked) < len(seats):
            for seat in seats:
                mine = flags | Flag.MARKED if seat.rank in marked else flags
                payload = payloads[seat.rank if len(payloads) > 1 else 0]
                self._send_one(call, payload, (seat,), mine)
        elif len(payloads) > 1:
            for seat in seats:
                self._send_one(call, payloads[seat.rank], (seat,), flags)
        else:
            self._send_one(call, payloads[0], seats, flags)
        if limit is not None or not self.watched:
            self.watched = True
            self._on_busy(limit)
        if call.tap is not None and any(len(seat.sent) > 1 for seat in seats):
            call.tap.queued()

    def _send_one(self, call: Call, payload: Payload, seats: Sequence[Seat], flags: int) -> None:
        """Send *payload* to *seats*, now or soon."""
        wire = call.wire
        want = call.want
        extra = EVERY_RANK if want is None else want
        packet = call_packet(payload, flags, self.epoch, wire, self.round, extra)
        file = payload.file
        if (
            len(seats[0].sent) > _PLENTY
            and file is None
            and call.stream is None
            and seats is self._seats.all
            and _are_busy(seats, _PLENTY)
            and self._keep(packet)
        ):
            if payload.extent is not None:
                for seat in seats:
                    seat.channel.lend(payload)
            return
        if self.kept:
            self.send_kept()
        refused: list[tuple[Seat, OSError]] = []
        for seat in seats:
            channel = seat.channel
            if payload.extent is not None:
                channel.lend(payload)
            try:
                if not channel.send(packet, file):
                    self._reading.want_to_write(channel.fileno(), on=True)
            except OSError as error:
                channel.take_back(payload)
                refused.append((seat, error))
            else:
                if call.stream is not None:
                    self.say(seat, Kind.MORE, wire, call.stream.window)
        for seat, refusal in refused:  # last: it ends the call, and its memory with it
            self._on_refused(seat, wire, refusal)

    def say(self, seat: Seat, kind: int, wire: int, extra: int = 0) -> None:
        """Send *seat* a message without a body about the sending *wire*."""
        self.transmit(seat, _NOTHING.packet(kind, epoch=self.epoch, call_id=wire, extra=extra))

    def transmit(self, seat: Seat, packet: bytes) -> None:
        """Send *seat* a packet, or have it sent when there is room."""
        if self.kept:
            self.send_kept()
        channel = seat.channel
        try:
            if not channel.send(packet):
                self._reading.want_to_write(channel.fileno(), on=True)
        except OSError as error:
            self._on_refused(seat, call_id_of(packet), error)

    def flush(self, seat: Seat) -> None:
        """Send what waits for room, as far as there is some."""
        channel = seat.channel
        for packet, error in channel.flush():
            self._on_refused(seat, call_id_of(packet), error)
        if not channel.backed_up and not seat.ended:
            self._reading.want_to_write(channel.fileno(), on=False)

    def withdraw_unbegun(self, lost: Sequence[Seat] = ()) -> int:
        """Keep every rank from beginning a collective call that none has begun.

        Those of *lost* that live, and are about to be stopped, begin nothing at all any more: what
        they had not begun is sent again. Returns the last call that any has begun.
        """
        if self.kept:
            self.send_kept()
        boards = [seat.channel.board for seat in self._seats]
        self.round += 1
        shut = [seat.channel.board for seat in lost]
        # One that died earlier may have begun, and answered, what is under way on others still.
        self._reached = withdraw(boards, self.round, self._reached, shut)
        return self._reached

    # --- rows of calls ----------------------------------------------------------------------

    def _keep(self, packet: bytes) -> bool:
        """Keep *packet* for all ranks, if it fits in; sends the row when it is complete."""
        size = len(packet) + 4
        if size > BUNDLE_LIMIT - self._kept_bytes:
            return False
        self.kept.append(packet)
        self._kept_bytes += size
        if len(self.kept) >= _ROW:
            self.send_kept()
        return True

    def send_kept(self) -> None:
        """Send what is kept."""
        kept, self.kept = self.kept, []
        self._kept_bytes = 0
        packet = kept[0] if len(kept) == 1 else bundle(kept)
        for seat in self._seats.all:
            channel = seat.channel
            try:
                if not channel.send(packet):
                    self._reading.want_to_write(channel.fileno(), on=True)
            except OSError as error:
                for each in kept:
                    self._on_refused(seat, call_id_of(each), error)


_COLLECTIVE = Shape.COLLECTIVE  # to look a member of an enum up takes as long as a call


def _have_room(seats: Sequence[Seat], depth: int) -> bool:
    """Whether all of *seats*, of which there are some, may be sent another call."""
    for seat in seats:
        if len(seat.sent) >= depth or seat.ended or seat.channel.backed_up:
            return False
    return bool(seats)


def _are_busy(seats: Sequence[Seat], calls: int) -> bool:
    """Whether each of *seats* owes more than so many *calls*."""
    for seat in seats:  # noqa: SIM110  # all() takes three times as long
        if len(seat.sent) <= calls:
            return False
    return True
