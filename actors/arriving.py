"""How answers come in: read from whoever has something, each matched to the sending it answers.

Guarantees: an answer is matched by the id of the very sending it belongs to, and by the
incarnation it comes from; anything else is dropped and counted. What a dead rank wrote is read to
its end.

Left to others: who reads, and when (`reading`), what an answer means for its call (`settling`).
Everything here but `on_ready` is under the plane's lock.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from phalanx.runtime import Arrival, Frame, Kind

from .interrupts import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import OwnedLock

    from .cuts import Cuts
    from .reading import Events, Reading
    from .seat import Seat, Seats
    from .sending import Sending
    from .settling import Settling
    from .taking import Taking


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
