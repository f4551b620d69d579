"""How calls leave: in their turn, each to all of its ranks at once, under one number.

Guarantees: a call leaves once all of its ranks have room for it, so it has a slot on every one
before its first byte goes out; a sending has a number of its own, higher than every one before
it and the same on all ranks; a message is encoded once, however many ranks get it.

Left to others: the order of the queues (`turns`), who waits for answers (`reading`). Everything
here is under the plane's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.runtime import EVERY_RANK, Flag, Kind, Payload, call_id_of

from .calls import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from .calls import Call
    from .reading import Reading
    from .seat import Seat, Seats
    from .turns import Turns

_NOTHING = Payload.of(None)


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
        holds: Drains under way: while there are any, nothing new is sent.
    """

    def __init__(
        self,
        seats: Seats,
        turns: Turns,
        reading: Reading,
        *,
        depth: int,
        on_refused: Callable[[Seat, int, OSError], None],
        on_busy: Callable[[float | None], None],
    ) -> None:
        self._seats = seats
        self._turns = turns
        self._reading = reading
        self._depth = depth
        self._on_refused = on_refused
        self._on_busy = on_busy
        self._wire = 0
        self.epoch = 0
        self.round = 0
        self.watched = False
        self.whole = False
        self.holds = 0

    def pump(self) -> None:
        """Send what may be sent, in order."""
        seats = self._seats.by_rank
        if self.holds or not seats:
            return
        turns = self._turns
        everyone = turns.everyone
        depth = self._depth
        if self.whole and everyone:
            taken = list(self._seats)
            while everyone and len(taken) == len(seats):
                if not all(seat.has_room(depth) for seat in taken):
                    break
                self._send(everyone.popleft(), taken)
        # Calls of one rank overtake collective ones only while those wait for a restart.
        if not (self.whole and everyone):
            for seat, alone in zip(seats, turns.alone, strict=True):
                while alone and seat is not None and seat.has_room(depth):
                    self._send(alone.popleft(), [seat])
            for seat in self._seats:
                if not turns.pool:
                    break
                if not seat.ended and not seat.sent:
                    self._send(turns.pool.popleft(), [seat])
        turns.admit(self._reading.wake)

    def pump_for(self, seat: Seat) -> None:
        """Send what waited for *seat*, which has answered."""
        turns = self._turns
        if turns.everyone or turns.pool or turns.alone[seat.rank]:
            self.pump()

    def _send(self, call: Call, seats: list[Seat]) -> None:
        """Send *call* to *seats*, which have room for it."""
        self._wire += 1
        wire = call.wire = self._wire
        flags = Flag.NONE
        if call.shape is Shape.COLLECTIVE:
            flags |= Flag.COLLECTIVE
        elif call.shape is Shape.POOL:
            call.rank = seats[0].rank
        if call.terms.tell:
            flags |= Flag.TELL
        if call.stream is not None:
            flags |= Flag.STREAM
        limit = call.hang_after
        call.missing = {seat.rank for seat in seats}
        for seat in seats:
            seat.sent[wire] = call
            if limit is not None:
                seat.limits[wire] = (call.name, limit)
        if call.tap is not None:
            call.tap.before_send(call, self.epoch, tuple((s.rank, s.incarnation) for s in seats))
        packet = b""
        payload = call.payload(seats[0].rank)
        refused: list[tuple[Seat, OSError]] = []
        for seat in seats:
            mine = call.payload(seat.rank)
            if mine is not payload or not packet:
                payload = mine
                packet = payload.packet(
                    Kind.CALL,
                    epoch=self.epoch,
                    call_id=wire,
                    incarnation=self.round,
                    flags=flags,
                    extra=EVERY_RANK if call.want is None else call.want,
                )
            if payload.extent is not None:
                seat.channel.lend(payload)
            error = self._transmit(seat, packet, payload.file)
            if error is not None:
                refused.append((seat, error))
            elif call.stream is not None:
                self.say(seat, Kind.MORE, wire, call.stream.window)
        for seat, error in refused:  # last: it ends the call, and its memory with it
            self._on_refused(seat, wire, error)
        if limit is not None or not self.watched:
            self.watched = True
            self._on_busy(limit)
        if call.tap is not None and any(len(seat.sent) > 1 for seat in seats):
            call.tap.queued()

    def say(self, seat: Seat, kind: Kind, wire: int, extra: int = 0) -> None:
        """Send *seat* a message without a body about the sending *wire*."""
        self.transmit(seat, _NOTHING.packet(kind, epoch=self.epoch, call_id=wire, extra=extra))

    def transmit(self, seat: Seat, packet: bytes) -> None:
        """Send *seat* a packet, or have it sent when there is room."""
        error = self._transmit(seat, packet)
        if error is not None:
            self._on_refused(seat, call_id_of(packet), error)

    def flush(self, seat: Seat) -> None:
        """Send what waits for room, as far as there is some."""
        channel = seat.channel
        for packet, error in channel.flush():
            self._on_refused(seat, call_id_of(packet), error)
        if not channel.is_backed_up and not seat.ended:
            self._reading.want_to_write(channel.fileno(), on=False)

    def _transmit(self, seat: Seat, packet: bytes, file: int | None = None) -> OSError | None:
        channel = seat.channel
        try:
            if not channel.send(packet, file):
                self._reading.want_to_write(channel.fileno(), on=True)
        except OSError as error:
            return error
        return None
