"""`RemoteRank`: the gateway's state of one remote rank; to the driver, it is the worker.

Guarantees:
- the rank has one call at a time. A call counts as begun, on the page that the driver reads, from
  the moment it is handed to the network, and before that it can be withdrawn, as from a local
  worker: so calls that no rank had begun are known here, also when the network is cut;
- when the rank's process has ended its relay reports the call it had really begun, and the page
  holds it before the end is reported to the driver;
- an answer that cannot be stored here becomes that call's error.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from phalanx.runtime.memory.mapping import WorkerExchange
from phalanx.runtime.wire.codec import encode
from phalanx.runtime.wire.packet_encoder import Payload
from phalanx.runtime.wire.packet_header import Flag, Kind
from phalanx.runtime.wire.progress_page import ProgressPage
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.supervision import RuntimeFault

from .buffered_socket import BufferedSocket
from .link import Delivery, Lane, Line, Link, SharedBodies
from .zeromq import OUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.runtime.wire.packet_decoder import Frame

_ANSWERS = (Kind.REPLY, Kind.ERROR, Kind.SKIPPED)
_BESIDE = (Kind.MORE, Kind.CLOSE, Kind.GO_ON)


class RemoteRank:
    """One incarnation of one rank, or a spare.

    Attributes:
        number: Its own among all ranks of this process, as the driver counts them, and that of
            its line.
        where: The machine that it is on.
        bodies: Those that the ranks behind the same link are sent; None until it is connected.
        trim_if_idle: See `Arena.trim_if_idle`, of its answers.
        connected: Its relay has sent a message.
        held: Calls that it has not been handed, in order, and what must come behind them.
        greeted: It has greeted the driver, so it may be sent calls.
        running: The call it has been handed and has not ended; 0 for none.
        recallable: Whether that one can be withdrawn as long as it has not begun.
        ended: No more messages come from it.
        why: Why its link was lost; empty if its process has ended.
        released: The driver has got that.
    """

    def __init__(
        self,
        number: int,
        where: int,
        fds: Mapping[str, int],
        connects_by: float,
    ) -> None:
        self.number = number
        self.where = where
        self.page = ProgressPage(fds["page"])
        self._exchange = WorkerExchange.inherit(fds)
        self.data = BufferedSocket(fds["data"], self._exchange.reader)
        self.control = BufferedSocket(fds["control"])
        self.line = Line(number, self._exchange.arena)
        self.bodies: SharedBodies | None = None
        self.trim_if_idle = self._exchange.arena.trim_if_idle
        self.connected = False
        self.held: deque[Frame] = deque()
        self._said: dict[int, list[Frame]] = {}  # about streams among those, by call
        self._items: dict[int, tuple[int, int]] = {}  # of streams: how many are wanted, and made
        self._received = 0  # the latest call: the driver may send one twice, and numbers grow
        self._incarnation = 0
        self._holds = 0  # the call after which the rank waits for `Kind.GO_ON`; 0 for none
        self.connects_by = connects_by  # else it is lost
        self.greeted = False
        self.running = 0
        self.recallable = False
        self.ended = False
        self.why = ""
        self.released = False

    @property
    def is_backed_up(self) -> bool:
        """Whether the driver has yet to read what this one has sent."""
        return self.data.is_backed_up or self.control.is_backed_up

    def connect(self, link: Link, bodies: SharedBodies) -> None:
        """Note that its side is behind *link*."""
        self.line.attach(link)
        self.bodies = bodies
        self.connected = True

    # --- from the driver ----------------------------------------------------------------

    def handle_ready(self, fd: int, events: int) -> None:
        """Take what the driver has sent to that socket, and send it what waited for room."""
        if events & OUT:
            self.line.taken(self.data.flush() + self.control.flush())
        if events & ~OUT:
            if fd == self.data.fd:
                self.read_data()
            else:
                while (frame := self.control.receive()) is not None:
                    if not self.ended:
                        self._send(Lane.CONTROL, frame)

    def read_data(self) -> None:
        """Take calls, and what belongs to them."""
        while (frame := self.data.receive()) is not None:
            if self.ended or frame.kind == Kind.HELLO:  # the rank's side has greeted it already
                frame.drop()
                continue
            if frame.kind == Kind.MORE:
                self._pace(frame.call_id, wanted=frame.extra)
            elif frame.kind == Kind.GO_ON and frame.call_id == self._holds:
                self._holds = 0
            elif frame.kind == Kind.STOP and self._holds:
                while self.held:  # it is to begin none of these
                    self.held.popleft().drop()
                self._send(Lane.DATA, frame)
                continue
            if frame.kind == Kind.CALL:
                if frame.call_id <= self._received:
                    frame.drop()
                    continue
                self._received = frame.call_id
            if frame.kind not in _BESIDE:
                self.held.append(frame)
            elif any(each.call_id == frame.call_id for each in self.held):
                self._said.setdefault(frame.call_id, []).append(frame)
            else:
                self._send(Lane.DATA, frame)

    def hand_over(self, *, frozen: bool) -> None:
        """Let it have the next call if it is free; not a collective one where that is *frozen*."""
        held = self.held
        while held and not self.ended and self.connected:
            frame = held[0]
            if frame.kind != Kind.CALL:  # a running one may need it: a stream that is to end
                self._send(Lane.DATA, held.popleft())
                continue
            collective = bool(frame.flags & Flag.COLLECTIVE)
            if self.running or self._holds or (frozen and collective):
                return
            held.popleft()
            said = self._said.pop(frame.call_id, [])
            now = self.page.begin(frame.call_id)
            sent_in = frame.incarnation
            self.running = frame.call_id
            self.recallable = collective
            if sent_in != now and self.page.is_void(
                frame.call_id, sent_in, now, collective=collective
            ):
                self._ended_call(frame.call_id, served=False)
                frame.drop()
                self._answer(frame, Kind.SKIPPED)
                continue
            if self._send(Lane.DATA, frame):
                for each in said:
                    self._send(Lane.DATA, each)

    # --- from the rank ------------------------------------------------------------------

    def deliver(self, delivery: Delivery) -> None:
        """Pass a packet of the rank's on to the driver."""
        _, kind, flags, _, call_id, incarnation, extra = delivery.head
        sock = self.data if delivery.lane is Lane.DATA else self.control
        if delivery.lane is Lane.DATA:
            if kind == Kind.HELLO:
                self._incarnation = incarnation
                self.greeted = True
            elif kind == Kind.PASSED or kind in _ANSWERS:
                self._ended_call(call_id, served=kind != Kind.SKIPPED)
                if kind == Kind.ERROR and flags & Flag.HELD:
                    self._holds = call_id
            elif kind == Kind.NOT_SAVED and flags & Flag.HELD:
                self._holds = call_id
            elif kind == Kind.ITEM:
                self._pace(call_id, made=extra)
            elif kind == Kind.SAVING and call_id == self.running:
                self.page.save(call_id)
            if kind in (Kind.PASSED, Kind.SAVING):
                self.line.taken(1)
                return
        error, large = delivery.error, delivery.large
        if error is None:
            if large is not None:
                large.lend(self._exchange.borrower)
            file = None if large is None else large.file
            try:
                self.line.taken(sock.send(delivery.packet(), file, counts=1))
            except RuntimeFault as lost:
                error = lost
            if large is not None:
                large.close()
        if error is not None:
            answer = Kind.NOT_SAVED if kind == Kind.SAVED else Kind.ERROR
            packet = error_packet(error, delivery.head, incarnation, answer)
            self.line.taken(sock.send(packet, counts=1))

    def note_progress(self, call_id: int) -> None:
        """Have the limit of that call begin anew, if it runs and its time does."""
        if call_id == self.running and self.page.begun_at:
            self.page.go_on()

    # --- its end ------------------------------------------------------------------------

    def end(self, begun: int | None, why: str = "") -> None:
        """Note that nothing more comes from it; *begun* is the last call it began, if it said."""
        self.ended = True
        self.why = why
        self.retract(begun)

    def retract(self, begun: int | None) -> None:
        """Correct the page if it says too much: *begun* is the last call begun, if known."""
        if begun is not None and begun < self.running:
            self.page.retract(begun)

    def release(self) -> None:
        """Tell the driver that this was all."""
        if self.released:
            return
        self.released = True
        text = Payload.of(encode(self.why, "the reason"))
        self.control.send(text.packet(Kind.LINK_ENDED, epoch=0, call_id=0))
        self.data.finish()
        self.control.finish()

    def close(self) -> None:
        """Give everything back."""
        while self.held:
            self.held.popleft().drop()
        self.line.close()
        self.data.close()
        self.control.close()
        self.page.close()
        self._exchange.arena.close()
        self._exchange.reader.close()

    # --- inside -------------------------------------------------------------------------

    def _pace(self, call_id: int, *, wanted: int = 0, made: int = 0) -> None:
        """Have the page say how long a stream takes for an item, as the rank's own would."""
        if call_id != self.running and all(each.call_id != call_id for each in self.held):
            return  # it has ended: what came after its last item would be kept for ever
        before = self._items.get(call_id, (0, 0))
        wanted, made = self._items[call_id] = max(wanted, before[0]), max(made, before[1])
        if call_id != self.running:
            return
        if made >= wanted:
            self.page.rest()
        elif (wanted, made) != before:
            self.page.go_on()

    def _send(self, lane: Lane, frame: Frame) -> bool:
        """Send *frame* to the rank; where that cannot be, its call ends in an error."""
        error: Exception | None = None
        if frame.flags & Flag.LOST:
            error = RuntimeFault("a message was lost: no descriptor was free; raise `ulimit -n`")
        else:
            try:
                self.line.send(lane, frame, self.bodies)
            except (ValueError, OSError, MemoryError) as broken:
                error = broken
        if error is not None:
            frame.drop()
            head = (0, 0, 0, frame.epoch, frame.call_id, 0, 0)
            if frame.kind == Kind.CALL:
                self._ended_call(frame.call_id, served=False)
                self.data.send(error_packet(error, head, self._incarnation))
            elif frame.kind == Kind.RESTORE:  # the rank waits for it
                self.line.send_packet(lane, error_packet(error, head, 0, Kind.RESTORE))
            return False
        return True

    def _ended_call(self, call_id: int, *, served: bool) -> None:
        self._items.pop(call_id, None)
        if call_id == self.running:
            self.page.finish(call_id, served=served)
            self.running = 0

    def _answer(self, call: Frame, kind: int) -> None:
        packet = Payload.of(None).packet(
            kind, epoch=call.epoch, call_id=call.call_id, incarnation=self._incarnation
        )
        self.data.send(packet)


def error_packet(
    error: BaseException, head: Sequence[int], incarnation: int, kind: int = Kind.ERROR
) -> bytes:
    """Return the answer that the call in *head* ended in *error* on its way."""
    payload = Payload.of(encode(RemoteFailure.of(error), "the error"))
    return payload.packet(kind, epoch=head[3], call_id=head[4], incarnation=incarnation)
