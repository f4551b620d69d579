"""`Sender`: writes calls to the channels of their ranks.

- Each sending has a number (wire id) higher than every one before it, the same on all ranks.
- A message is encoded once, for any number of ranks.
- The sending of a call may be repeated: ranks drop a call whose number is not above that of the
  one before. So a call whose sending an exception has interrupted is sent once more, whole.
- Batching: when every rank has many calls before it, further small calls are kept and sent in one
  packet, long before a rank runs out of calls, at the latest when the plane begins to read.

Guarded by the plane's lock.
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
    call_ids_of,
    call_packet,
    withdraw,
)

from .call import COLLECTIVE, POOL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from phalanx.actors.checkpoint.coordinator import CheckpointCoordinator

    from .call import Call
    from .rank import RankSlot, RankTable
    from .reader import Reader

_NOTHING = Payload.of(None)
_PLENTY: Final = 8  # calls that a rank has been sent and not answered before more are kept
_BATCH: Final = 16  # calls that are kept at most
_ENTRY: Final = 4  # bytes of a batch in which a packet's length stands


class Sender:
    """The sending side of one group.

    Args:
        on_refused: Called with a call that could not be sent to a rank which is alive.
        on_busy: See `CallPlane`.

    Attributes:
        epoch: The epoch that calls are sent under.
        round: How often calls have been withdrawn (`runtime.wire.progress_page`).
        is_watched: Whether *on_busy* has been called since the ranks were last idle.
        batch: Packets for all ranks that not all of them have been sent yet, in order.
    """

    def __init__(
        self,
        table: RankTable,
        reader: Reader,
        snapshots: CheckpointCoordinator | None,
        on_refused: Callable[[RankSlot, int, OSError], None],
        on_busy: Callable[[float | None], None],
    ) -> None:
        self._table = table
        self._reader = reader
        self._snapshots = snapshots
        self._on_refused = on_refused
        self._on_busy = on_busy
        self._wire = 0
        self.epoch = 0
        self.round = 0
        self.is_watched = False
        self.batch: list[bytes] = []
        self._batch_bytes = 0
        self._reached = 0  # the last call begun by any rank, ranks that have died included

    def send(self, call: Call, slots: Sequence[RankSlot]) -> None:
        """Send *call* to *slots* under a new number.

        If an exception has interrupted that, once more under the same number.
        """
        if not call.wire:
            self._wire = call.wire = self._wire + 1
        wire = call.wire
        table = self._table
        shape = call.shape
        flags = Flag.NONE
        if shape is COLLECTIVE:
            flags = Flag.COLLECTIVE
        elif shape is POOL:
            call.rank = slots[0].rank
        if call.options.tell:
            flags |= Flag.TELL
        if call.stream is not None:
            flags |= Flag.STREAM
        call.asked = table.ranks if slots is table.all else tuple([slot.rank for slot in slots])
        for slot in slots:
            if wire not in slot.sent:  # no call between the two steps: nothing is thrown in there
                slot.sent[wire] = call
                table.owed += 1
        if call.probe is not None:
            call.probe.before_send(call, self.epoch, tuple((s.rank, s.incarnation) for s in slots))
        payloads = call.payloads
        limit = call.hang_after
        marked: Collection[int] = ()
        if self._snapshots is not None:
            marked = self._snapshots.mark(call, call.asked, len(table))
            saving = self._snapshots.limit
            if marked and saving is not None:
                limit = saving if limit is None else min(limit, saving)
            if len(marked) == len(slots):
                flags |= Flag.MARKED
        refused: list[tuple[RankSlot, OSError]] = []
        if len(payloads) > 1 or 0 < len(marked) < len(slots):
            for slot in slots:
                payload = payloads[slot.rank if len(payloads) > 1 else 0]
                mine = flags | Flag.MARKED if slot.rank in marked else flags
                self._send_one(call, payload, (slot,), mine, refused)
        else:
            self._send_one(call, payloads[0], slots, flags, refused)
        for slot, error in refused:  # last: it ends the call, and its memory with it
            self._on_refused(slot, wire, error)
        if limit is not None or not self.is_watched:
            self.is_watched = True
            self._on_busy(limit)
        if call.probe is not None and any(len(slot.sent) > 1 for slot in slots):
            call.probe.queued()

    def _send_one(
        self,
        call: Call,
        payload: Payload,
        slots: Sequence[RankSlot],
        flags: int,
        refused: list[tuple[RankSlot, OSError]],
    ) -> None:
        """Send *payload* to *slots*, now or with a batch; add to *refused* where it cannot be."""
        wire = call.wire
        want = call.want
        extra = EVERY_RANK if want is None else want
        packet = call_packet(payload, flags, self.epoch, wire, self.round, extra)
        file = payload.file
        extent = payload.extent
        more = payload.rest
        if (
            len(slots[0].sent) > _PLENTY
            and file is None
            and not more
            and call.stream is None
            and slots is self._table.all
            and _are_busy(slots, _PLENTY)
            and self._batch_bytes + len(packet) + _ENTRY <= BUNDLE_LIMIT
        ):
            if extent is not None:
                for slot in slots:
                    extent.lend(slot.channel.borrower)
            self._keep(packet)
            return
        if self.batch:
            self.send_batch()
        for slot in slots:
            channel = slot.channel
            if extent is not None:
                extent.lend(channel.borrower)
            try:
                if not channel.send(packet, file, more):
                    self._reader.want_to_write(channel.fileno(), on=True)
            except OSError as error:
                payload.take_back(channel.borrower)
                refused.append((slot, error))
            else:
                if call.stream is not None:
                    self.say(slot, Kind.MORE, wire, call.stream.window)

    def say(self, slot: RankSlot, kind: int, wire: int, extra: int = 0) -> None:
        """Send *slot* a message without a body about the sending *wire*."""
        self.transmit(slot, _NOTHING.packet(kind, epoch=self.epoch, call_id=wire, extra=extra))

    def transmit(self, slot: RankSlot, packet: bytes) -> None:
        """Send *slot* a packet behind everything before it."""
        if self.batch:
            self.send_batch()
        error = self._write(slot, packet)
        if error is not None:
            self._refuse(slot, packet, error)

    def flush(self, slot: RankSlot) -> None:
        """Send the packets that wait for room, as far as there is some."""
        channel = slot.channel
        for packet, error in channel.flush():
            self._refuse(slot, packet, error)
        if not channel.backed_up and not slot.ended:
            self._reader.want_to_write(channel.fileno(), on=False)

    def send_batch(self) -> None:
        """Send the packets that are kept; they stay in `batch` until every rank has got them."""
        batch = self.batch
        packet = batch[0] if len(batch) == 1 else bundle(batch)
        refused = [
            (slot, error) for slot in self._table.all if (error := self._write(slot, packet))
        ]
        self.batch = []
        self._batch_bytes = 0
        for slot, error in refused:
            self._refuse(slot, packet, error)

    def _refuse(self, slot: RankSlot, packet: bytes, error: OSError) -> None:
        for wire in call_ids_of(packet):
            self._on_refused(slot, wire, error)

    def send_batch_if_low(self) -> None:
        """Send the packets that are kept unless every rank still has enough calls."""
        if not _are_busy(self._table.all, _PLENTY // 2 + len(self.batch)):
            self.send_batch()

    def withdraw_unbegun(self, lost: Sequence[RankSlot] = ()) -> int:
        """Void every collective call that no rank has begun; return the last that any has begun.

        Those of *lost* that live, and are about to be stopped, begin no call at all: what they had
        not begun is sent again.
        """
        if self.batch:
            self.send_batch()
        pages = [slot.channel.page for slot in self._table]
        self.round += 1
        shut = [slot.channel.page for slot in lost]
        # A rank that died earlier may have begun, and answered, what others still run.
        self._reached = withdraw(pages, self.round, self._reached, shut)
        return self._reached

    def _keep(self, packet: bytes) -> None:
        """Add *packet* to the batch; sends the batch when it is complete."""
        self._batch_bytes += len(packet) + _ENTRY
        self.batch.append(packet)
        if len(self.batch) >= _BATCH:
            self.send_batch()

    def _write(self, slot: RankSlot, packet: bytes) -> OSError | None:
        """Send *packet*; return the error if that is refused."""
        channel = slot.channel
        try:
            channel.send(packet)
        except OSError as error:
            return error
        finally:
            # Also after an exception thrown in, which would else leave it so for ever.
            if channel.backed_up and not slot.ended:
                self._reader.want_to_write(channel.fileno(), on=True)
        return None


def _are_busy(slots: Sequence[RankSlot], calls: int) -> bool:
    """Whether each of *slots* owes more than so many *calls*."""
    for slot in slots:  # noqa: SIM110  # all() takes three times as long
        if len(slot.sent) <= calls:
            return False
    return True
