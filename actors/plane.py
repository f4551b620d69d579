"""The one owner of a group's calls: it sends them, reads the answers, and settles each once.

Guarantees:
- every accepted call is settled exactly once, whatever dies (`docs/semantics.md`);
- all ranks get the collective calls in one order, and a call takes a slot on every rank before
  its first byte goes out;
- an answer is matched by the id of the very sending it belongs to; anything else is dropped and
  counted;
- a rank that wrote its answer before it died has answered: `lose` reads to the end first;
- calls that no rank had begun when a death came are sent again, in order, at no cost;
- what survivors raise because another rank died counts as that death, not as their exception;
- nobody runs another's code while reading: answers are kept as bytes, callbacks run elsewhere.

Left to others: who reads (`reading`), when ranks come and go (`executor_actor`), what a call
means (`calls`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.runtime import (
    ARENA_IDLE,
    ARENA_LONGEST,
    EVERY_RANK,
    Arena,
    Flag,
    Frame,
    Kind,
    Payload,
    call_id_of,
    ledger,
    receive,
    send,
    withdraw,
)
from phalanx.supervision import ExecutorClosed, RuntimeFault, SpecError

from .calls import Call, Shape
from .interrupts import uninterrupted
from .outcomes import Outcome, OutcomeKind
from .reading import Reading, Ticket

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Iterator

    from phalanx.runtime import Board, DriverExchange, Hub, Timer


_NOTHING = Payload.of(None)
_DOUBT = 0.5  # seconds that an exception out of a process group waits for a death behind it
_PEER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


@dataclass(slots=True)
class Seat:
    """One rank's place in the group, and the incarnation that sits in it.

    Attributes:
        sent: What this incarnation has been sent and not yet answered, by wire id; None where
            the call has been settled without it.
        outbox: Packets the socket had no room for, in order.
        limits: Of what it has been sent, the calls that may run for so long: name and seconds.
    """

    rank: int
    incarnation: int
    sock: socket.socket
    board: Board
    exchange: DriverExchange
    sent: dict[int, Call | None] = field(default_factory=dict[int, Call | None])
    outbox: deque[tuple[bytes, int | None]] = field(
        default_factory=deque[tuple[bytes, "int | None"]]
    )
    limits: dict[int, tuple[str, float]] = field(default_factory=dict[int, "tuple[str, float]"])
    ended: bool = False
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A rank that owes answers, and the call it is in.

    Attributes:
        method: What it runs; empty for nothing, and for a call that was settled without it.
        limit: For how many seconds it may; None for no limit.
        shortest: The least limit of anything it has been sent; None for none.
        began: When it began that, in seconds on the monotonic clock; 0.0 for nothing.
        spoke: Whether it had written something that nobody had read: then it has just been freed.
    """

    rank: int
    incarnation: int
    method: str = ""
    limit: float | None = None
    shortest: float | None = None
    began: float = 0.0
    spoke: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank was doing.

    Attributes:
        method: The call it had begun and not ended, or None.
        call: That call's number.
        running: For how long, in seconds.
        served: Calls this incarnation has ended.
        queued: Calls sent to it and not begun.
    """

    method: str | None = None
    call: int | None = None
    running: float | None = None
    served: int = 0
    queued: int = 0


class Plane:
    """The calls of one rank group.

    Args:
        depth: Calls that one rank may have been sent and not answered; also how many calls may
            wait for their turn before `submit` blocks.
        on_end: Told (rank, incarnation) when a rank's stream ends; runs under no lock.
        on_foreign: Told the rank whose socket brought something that is no message, once for each
            incarnation; runs under the lock.
        on_busy: Told that ranks owe answers again, and of each call with a limit, which it is
            given. Runs under the lock, in a caller's thread: it must be quick.
    """

    def __init__(
        self,
        hub: Hub,
        size: int,
        *,
        depth: int = 64,
        on_end: Callable[[int, int], None],
        on_foreign: Callable[[int], None] = lambda _: None,
        on_busy: Callable[[float | None], None] = lambda _limit: None,
    ) -> None:
        self._hub = hub
        self._depth = depth
        self._on_end = on_end
        self._on_foreign = on_foreign
        self._on_busy = on_busy
        self._watched = False
        self._lock = threading.Lock()
        self._seats: list[Seat | None] = [None] * size
        self._by_fd: dict[int, Seat] = {}
        self._epoch = 0
        self._whole = False
        self._holds = 0  # drains under way: nothing new is sent
        self._closed: Callable[[], BaseException] | None = None
        self._wire = 0
        self._round = 0
        self._doubtful: dict[int, tuple[Call, set[int]]] = {}  # by wire id; who has raised
        self._unanswered = 0
        self._turns: deque[Call] = deque()  # COLLECTIVE and GATHER, in order
        self._alone: list[deque[Call]] = [deque() for _ in range(size)]  # SINGLE, by rank
        self._pool: deque[Call] = deque()
        self._room: deque[Ticket] = deque()  # submitters that wait for a place
        self._idle: list[threading.Event] = []
        self.dropped = 0
        self.arena = Arena.create()
        self._abandoned: deque[Call] = deque()  # streams whose taker was collected
        self._trimming: Timer | None = None
        self._reading = Reading(
            hub, self._lock, self._on_ready, self._on_nudge, lambda: self._unanswered > 0
        )

    # --- membership ---------------------------------------------------------------------

    def resize(self, size: int) -> None:
        """Have *size* seats; those beyond must be empty, and their calls are re-aimed or failed."""
        with self._lock:
            for alone in self._alone[size:]:
                for call in alone:
                    self._settle(call, error=ExecutorClosed(f"rank {call.rank} was taken away"))
            for call in [each for each in self._turns if not each.fits(size)]:
                self._turns.remove(call)
                msg = f"{call.name}: the group has {size} ranks now; it was made for another size"
                self._settle(call, error=SpecError("world_size", size, msg))
            self._seats = (self._seats + [None] * size)[:size]
            self._alone = (self._alone + [deque[Call]() for _ in range(size)])[:size]

    def join(
        self,
        rank: int,
        incarnation: int,
        sock: socket.socket,
        board: Board,
        exchange: DriverExchange,
    ) -> None:
        """Seat a new incarnation; from here on it may be sent calls of its own."""
        sock.setblocking(False)
        with self._lock:
            board.enter(self._round)
            seat = Seat(rank, incarnation, sock, board, exchange)
            self._seats[rank] = seat
            self._by_fd[sock.fileno()] = seat
            self._reading.add(sock.fileno())
            self._pump()

    def open(self, epoch: int) -> None:
        """Every seat is taken: let collective calls go, under *epoch*."""
        with self._lock:
            self._epoch = epoch
            self._whole = True
            self._pump()

    def hold(self) -> None:
        """Keep collective calls back until `open`."""
        with self._lock:
            self._whole = False

    def progress(self, rank: int, incarnation: int) -> Progress:
        """Read what *rank* has written, to the end, and return what it was doing."""
        with self._lock:
            seat = self._seat(rank, incarnation)
            if seat is None:
                return Progress()
            self._whole = False  # before its answers make room for further calls
            self._drain(seat)
            board = seat.board
            begun, running = board.begun, board.begun > board.finished
            call = seat.sent.get(begun) if running else None
            queued = sum(1 for wire in seat.sent if wire > begun)
            return Progress(
                method=call.name if call is not None else None,
                call=call.seq if call is not None else None,
                running=time.monotonic() - board.begun_at if running else None,
                served=board.served,
                queued=queued,
            )

    def running(self) -> list[Running]:
        """Return the ranks that owe answers, once what they have written has been read.

        Where there are none, `on_busy` will tell when there are again.
        """
        with self._lock:
            found: list[Running] = []
            for seat in self._seats:
                if seat is None or not seat.sent:
                    continue
                owed = len(seat.sent)
                self._drain(seat)
                board = seat.board
                wire, idle = board.begun, board.begun <= board.finished
                method, limit = seat.limits.get(wire, ("", None))
                call = seat.sent.get(wire)
                if call is not None:
                    method = call.name
                spoke = len(seat.sent) != owed
                found.append(
                    Running(
                        seat.rank,
                        seat.incarnation,
                        "" if idle else method,
                        None if idle else limit,
                        min((each for _, each in seat.limits.values()), default=None),
                        0.0 if idle else board.begun_at,
                        spoke,
                    )
                )
            self._watched = bool(found)
            return found

    def lose(
        self, ranks: dict[int, int], report: Any, error: Callable[[Call], BaseException]
    ) -> None:
        """Settle or send again what was under way on *ranks* (rank to incarnation).

        What they had begun costs an attempt, for which *report* is kept, or ends in *error*. They
        are dead, or are about to be stopped. Their sockets are given back only by `leave`,
        since one that is being stopped may still be writing.
        """
        with self._lock:
            lost = [
                seat
                for rank, incarnation in ranks.items()
                if (seat := self._seat(rank, incarnation)) is not None
            ]
            self._whole = False  # before their answers make room for further calls
            for seat in lost:
                self._drain(seat)
            survivors = [s for s in self._seats if s is not None and s not in lost]
            # From here on no survivor begins a collective call that no rank has begun.
            everyone = (*survivors, *lost)
            self._round += 1
            before = max((seat.board.begun for seat in everyone), default=0)
            withdraw([seat.board for seat in everyone], self._round, before)
            reached = max((seat.board.begun for seat in everyone), default=0)
            again: list[Call] = []
            touched: dict[int, Call] = {}
            for doubted, _ in list(self._doubtful.values()):
                if report is None:
                    self._fail(doubted)  # a stop that was asked for explains no exception
                else:
                    touched[doubted.wire] = doubted
            for seat in lost:
                for call in seat.sent.values():
                    if call is not None and not call.done:
                        touched[call.wire] = call
            # Withdrawn from the survivors with the others: what no rank had begun.
            for seat in survivors:
                for wire, call in seat.sent.items():
                    if call is not None and call.shape is Shape.COLLECTIVE and wire > reached:
                        touched[call.wire] = call
            for wire in sorted(touched):
                call = touched[wire]
                if call.shape is Shape.GATHER:
                    self._lose_part(call, lost, error)
                    continue
                if call.shape is Shape.COLLECTIVE:
                    begun = wire <= reached
                else:
                    begun = any(wire <= s.board.begun for s in lost if wire in s.sent)
                if begun and report is not None:
                    call.reports.append(report)
                if begun and call.retries <= 0:
                    self._settle(call, error=error(call))
                    continue
                call.retries -= begun
                again.append(call)
            for call in again:
                self._forget(call)
            self._requeue(again)
            for seat in lost:
                self._unanswered -= len(seat.sent)
                seat.sent.clear()
                seat.ended = True
                self._unwatch(seat)
            self._pump()
            self._wake_idle()

    def leave(self, rank: int, incarnation: int) -> None:
        """Free the seat of an incarnation that is gone, after `lose`."""
        with self._lock:
            seat = self._seat(rank, incarnation)
            if seat is None:
                return
            self._seats[rank] = None
            self._unwatch(seat)
            for _, file in seat.outbox:
                if file is not None:
                    os.close(file)
            _free(seat)

    def end(
        self, error: Callable[[Call], BaseException], closed: Callable[[], BaseException]
    ) -> None:
        """Settle every call that is left, and refuse new ones with *closed*."""
        with self._lock:
            self._closed = closed
            left = {id(call): call for call in self._calls()}
            for call in left.values():
                self._settle(call, error=error(call))
            self._turns.clear()
            self._pool.clear()
            for alone in self._alone:
                alone.clear()
            self._make_room(everyone=True)
            self._wake_idle()

    def refuse(self, closed: Callable[[], BaseException]) -> None:
        """Accept no new calls; those accepted go on."""
        with self._lock:
            self._closed = closed
            self._make_room(everyone=True)

    def close(self) -> None:
        """Give everything back; no call is left (`end`)."""
        with self._lock:
            for seat in self._seats:
                if seat is not None:
                    _free(seat)
            self._seats = []
            self._by_fd.clear()
            if self._trimming is not None:
                self._trimming.cancel()
            self.arena.close()
        self._reading.close()

    # --- calls --------------------------------------------------------------------------

    @uninterrupted
    def check_open(self) -> None:
        """Raise what new calls are refused with, if they are."""
        with self._lock:
            if self._closed is not None:
                raise self._closed()

    @uninterrupted
    def has_room(self) -> bool:
        """Whether `submit` would take a call without blocking."""
        with self._lock:
            return self._closed is not None or self._waiting() < self._depth

    def submit(self, call: Call, *, waits: bool) -> None:
        """Accept *call*: send it, or let it wait for its turn.

        With *waits* the caller will wait for the call itself, so it may queue at once; otherwise
        this blocks, up to the call's deadline, while too many calls wait for their turn.

        Raises:
            ExecutorClosed: nothing is accepted any more.
            CallTimeout: no place became free; nothing was sent.
        """
        deadline = call.terms.deadline
        while (room := self._accept(call, waits=waits)) is not None:
            if not self._reading.wait(room, deadline):
                with self._lock, contextlib.suppress(ValueError):
                    self._room.remove(room)
                call.drop()
                raise call.timed_out()

    @uninterrupted
    def _accept(self, call: Call, *, waits: bool) -> Ticket | None:
        """Send *call* or queue it, and return None; or return a ticket for a place in the queue."""
        with self._lock:
            closed = self._closed
            size = len(self._seats)
            fits = call.fits(size)
            if closed is None and fits:
                if waits or self._waiting() < self._depth:
                    self._enqueue(call)
                    self._pump()
                    if not waits:
                        self._reading.see_to_it()
                    return None
                room = Ticket()
                self._room.append(room)
                return room
        call.drop()
        if closed is not None:
            raise closed()
        raise SpecError("world_size", size, f"{call.name} was made for another size")

    def wait(self, call: Call, deadline: float | None) -> bool:
        """Return True once *call* is done, False at *deadline*."""
        return self._reading.wait(call, deadline)

    @uninterrupted
    def expire(self, call: Call) -> dict[int, int]:
        """Settle *call* as timed out, unless it is done; return who owes it (rank: incarnation)."""
        with self._lock:
            if call.done:
                return {}
            seats = (seat for seat in self._seats if seat is not None)
            late = {
                seat.rank: seat.incarnation for seat in seats if seat.sent.get(call.wire) is call
            }
            if call.shape is Shape.GATHER and call.wire:
                for rank in sorted(call.missing):
                    error = call.timed_out()
                    call.answers[rank] = Outcome(rank, OutcomeKind.TIMEOUT, error=error)
                self._settle(call)
            elif call.failed is not None:
                self._settle(call)
            else:
                self._settle(call, error=call.timed_out())
            self._forget(call)
            self._pump()
            return late

    @uninterrupted
    def cancel(self, call: Call) -> bool:
        """Withdraw *call*, or void its answers if it has been sent; False if it is done."""
        with self._lock:
            if call.done:
                return False
            self._settle(call, error=CancelledError())
            self._forget(call)
            self._pump()
            return True

    # --- streams ------------------------------------------------------------------------

    @uninterrupted
    def take(
        self, call: Call, wake: Callable[[], None] | None = None
    ) -> tuple[int, Frame] | Ticket | None:
        """Return the next item of *call*'s stream and its rank, or None after the last.

        Where none is there yet, a ticket that is done when there is news; or *wake* is called
        then, on whichever thread brings it.
        """
        stream = call.stream
        assert stream is not None
        with self._lock:
            if stream.items:
                rank, frame = stream.items.popleft()
                more = stream.grant(rank)
                seat = self._seats[rank] if rank < len(self._seats) else None
                if more is not None and seat is not None and seat.sent.get(call.wire) is call:
                    self._say(seat, Kind.MORE, call.wire, more)
                return rank, frame
            if call.done:
                return None
            stream.ticket = Ticket()
            stream.wake = wake
            self._reading.see_to_it()
            return stream.ticket

    def wait_for(self, ticket: Ticket) -> None:
        """Return once *ticket* is done; a call's deadline sees to that."""
        self._reading.wait(ticket, None)

    @uninterrupted
    def abandon(self, call: Call) -> None:
        """Nobody takes *call*'s items any more."""
        self.cancel(call)
        with self._lock:
            assert call.stream is not None
            call.stream.items.clear()

    def abandon_later(self, call: Call) -> None:
        """The same, soon; takes no lock, so a finalizer may call it anywhere."""
        self._abandoned.append(call)
        self._reading.nudge()

    @uninterrupted
    def _on_nudge(self) -> None:
        if self._abandoned:
            with self._lock:
                self._pump()

    def _bury_abandoned(self) -> None:
        while self._abandoned:
            call = self._abandoned.popleft()
            self._settle(call, error=CancelledError())
            self._forget(call)

    def _keep_item(self, seat: Seat, frame: Frame) -> None:
        call = seat.sent[frame.call_id]
        if call is None or call.done or call.wire != frame.call_id or call.stream is None:
            frame.drop()  # it was closed, and its worker has been told
            self.dropped += 1
            return
        call.stream.items.append((seat.rank, frame))
        self._tell_taker(call)

    def _end_stream(self, call: Call) -> None:
        """Tell the taker that nothing more comes, and the workers that nothing more is wanted."""
        for seat in self._seats:
            if seat is not None and not seat.ended and seat.sent.get(call.wire) is call:
                self._say(seat, Kind.CLOSE, call.wire, 0)
        self._tell_taker(call)

    def _tell_taker(self, call: Call) -> None:
        stream = call.stream
        assert stream is not None
        ticket, stream.ticket = stream.ticket, None
        wake, stream.wake = stream.wake, None
        if ticket is not None:
            ticket.done = True
            self._reading.wake(ticket)
        if wake is not None:
            wake()

    def _say(self, seat: Seat, kind: Kind, wire: int, extra: int) -> None:
        packet = _NOTHING.packet(kind, epoch=self._epoch, call_id=wire, extra=extra)
        self._transmit(seat, packet, None)

    @uninterrupted
    def when_settled(self, call: Call, then: Callable[[Call], None]) -> None:
        """Run ``then(call)`` when *call* is done; on whichever thread settles it: be quick."""
        with self._lock:
            if not call.done:
                call.settled.append(then)
                return
        then(call)

    def wait_idle(self, deadline: float | None) -> bool:
        """Hold new calls back until every call that was sent has been answered."""
        done = threading.Event()
        limit = None if deadline is None else max(0.0, deadline - time.monotonic())
        ok = False
        self._hold_for(done)
        try:
            ok = done.wait(limit)
        finally:
            if not ok:  # Ctrl-C too: a hold that nobody lifts would stop the group for good
                self.resume()
        return ok

    @uninterrupted
    def _hold_for(self, done: threading.Event) -> None:
        with self._lock:
            self._holds += 1
            self._idle.append(done)
            self._wake_idle()
            self._reading.see_to_it()

    @uninterrupted
    def resume(self) -> None:
        """Let calls go again after `wait_idle`."""
        with self._lock:
            self._holds -= 1
            self._pump()

    def post(self, rank: int, incarnation: int, packet: bytes) -> None:
        """Queue *packet* behind the calls that *rank* has been sent."""
        with self._lock:
            seat = self._seat(rank, incarnation)
            if seat is not None and not seat.ended:
                self._transmit(seat, packet, None)

    @uninterrupted
    def counts(self) -> dict[str, int]:
        """Return how many calls are sent, wait for their turn, and how many answers were void."""
        with self._lock:
            running = {id(c) for c in self._calls() if c.wire}
            return {
                "in_flight": len(running),
                "waiting": self._waiting(),
                "dropped_replies": self.dropped,
            }

    # --- sending (all of it under the lock) ----------------------------------------------

    def _waiting(self) -> int:
        return len(self._turns) + len(self._pool) + sum(map(len, self._alone))

    def _enqueue(self, call: Call) -> None:
        if self.arena.is_warm:
            self._trim_later()
        match call.shape:
            case Shape.COLLECTIVE | Shape.GATHER:
                self._turns.append(call)
            case Shape.SINGLE:
                assert call.rank is not None
                self._alone[call.rank].append(call)
            case Shape.POOL:
                self._pool.append(call)

    def _requeue(self, calls: list[Call]) -> None:
        """Put *calls* back to the front of their queues, oldest first."""
        for call in sorted(calls, key=lambda each: each.seq, reverse=True):
            self._doubtful.pop(call.wire, None)
            call.failed = None
            call.wire = 0
            call.answers.clear()
            match call.shape:
                case Shape.COLLECTIVE | Shape.GATHER:
                    self._turns.appendleft(call)
                case Shape.SINGLE:
                    assert call.rank is not None
                    self._alone[call.rank].appendleft(call)
                case Shape.POOL:
                    call.rank = None
                    self._pool.appendleft(call)

    def _pump(self) -> None:
        """Send what may be sent, in order."""
        if self._abandoned:
            self._bury_abandoned()
        if self._holds or not self._seats:
            return
        turns = self._turns
        seats = self._seats
        if self._whole:
            while turns:
                if not all(seat is not None and self._has_room(seat) for seat in seats):
                    break
                self._send(turns.popleft(), [seat for seat in seats if seat is not None])
        # Calls of one rank overtake collective ones only while those wait for a restart.
        if not (self._whole and turns):
            for rank, alone in enumerate(self._alone):
                seat = seats[rank]
                while alone and seat is not None and self._has_room(seat):
                    self._send(alone.popleft(), [seat])
            if self._pool:
                for seat in seats:
                    if not self._pool:
                        break
                    if seat is not None and not seat.ended and not seat.sent:
                        self._send(self._pool.popleft(), [seat])
        self._make_room()

    def _has_room(self, seat: Seat) -> bool:
        return not seat.ended and len(seat.sent) < self._depth and not seat.outbox

    def _send(self, call: Call, seats: list[Seat]) -> None:
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
        extra = EVERY_RANK if call.want is None else call.want
        packet = b""
        payload = call.payload(seats[0].rank)
        call.missing = {seat.rank for seat in seats}
        for seat in seats:
            mine = call.payload(seat.rank)
            if mine is not payload or not packet:
                payload = mine
                packet = payload.packet(
                    Kind.CALL,
                    epoch=self._epoch,
                    call_id=wire,
                    incarnation=self._round,
                    flags=flags,
                    extra=extra,
                )
            seat.sent[wire] = call
            if call.hang_after is not None:
                seat.limits[wire] = (call.name, call.hang_after)
            self._unanswered += 1
            if payload.extent is not None:
                payload.lend(seat.exchange.borrower)
            self._transmit(seat, packet, payload.file)
            if call.stream is not None:
                self._say(seat, Kind.MORE, wire, call.stream.window)
        if call.hang_after is not None or not self._watched:
            self._watched = True
            self._on_busy(call.hang_after)

    def _transmit(self, seat: Seat, packet: bytes, file: int | None) -> None:
        if seat.outbox:
            seat.outbox.append((packet, None if file is None else os.dup(file)))
            return
        try:
            send(seat.sock, packet, file)
        except BlockingIOError:
            seat.outbox.append((packet, None if file is None else os.dup(file)))
            self._reading.want_to_write(seat.sock.fileno(), on=True)
        except OSError as error:
            self._not_sent(seat, packet, error)

    def _not_sent(self, seat: Seat, packet: bytes, error: OSError) -> None:
        """End the call in *packet*, unless *seat*'s rank is gone: its death settles everything."""
        if error.errno in _PEER_GONE:
            return
        call = seat.sent.pop(call_id_of(packet), None)
        if call is not None:
            self._unanswered -= 1
            msg = f"{call.name} could not be sent to rank {seat.rank}: {error}"
            self._settle(call, error=RuntimeFault(msg))
            self._forget(call)

    def _flush(self, seat: Seat) -> None:
        while seat.outbox:
            packet, file = seat.outbox[0]
            try:
                send(seat.sock, packet, file)
            except BlockingIOError:
                return
            except OSError as error:
                self._not_sent(seat, packet, error)
            seat.outbox.popleft()
            if file is not None:
                os.close(file)
        if not seat.ended:
            self._reading.want_to_write(seat.sock.fileno(), on=False)

    def _trim_later(self, wait: float = ARENA_IDLE) -> None:
        """Give the arena's memory back once it has lain idle."""
        if self._trimming is not None or self.arena.fd < 0:
            return
        placed = self.arena.placed

        def look() -> None:
            with self._lock:
                self._trimming = None
                idle = self.arena.placed == placed
                if idle:
                    self.arena.trim()
                if self.arena.is_warm:
                    # Idle and yet warm: a reader keeps something. Then look less often.
                    self._trim_later(min(2 * wait, ARENA_LONGEST) if idle else ARENA_IDLE)

        self._trimming = self._hub.call_at(time.monotonic() + wait, look)

    def _make_room(self, *, everyone: bool = False) -> None:
        room = self._room
        free = len(room) if everyone else self._depth - self._waiting()
        while room and free > 0:
            ticket = room.popleft()
            ticket.done = True
            self._reading.wake(ticket)
            free -= 1

    # --- reading ------------------------------------------------------------------------

    @uninterrupted
    def _on_ready(self, fd: int, events: int) -> None:
        ended: Seat | None = None
        with self._lock:
            seat = self._by_fd.get(fd)
            if seat is None:
                return
            if events & select.EPOLLOUT:
                self._flush(seat)
                self._pump()
            if events & ~select.EPOLLOUT and not self._read(seat):
                seat.ended = True
                self._unwatch(seat)
                ended = seat
        if ended is not None:
            self._on_end(ended.rank, ended.incarnation)

    def _read(self, seat: Seat) -> bool:
        """Read what is there and act on it; return False at the end of the stream."""
        while True:
            try:
                frame = receive(seat.sock, seat.exchange.reader)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue  # what it wrote before follows
            except OSError:
                return False
            if frame is None:
                self._drop_foreign(seat)
            elif not isinstance(frame, Frame):
                return False
            else:
                self._arrive(seat, frame)
            if not seat.sent:
                return True  # it owes no answer: asking once more would cost and find nothing

    def _drain(self, seat: Seat) -> None:
        """Read everything a dead rank has written."""
        while not seat.ended:
            try:
                frame = receive(seat.sock, seat.exchange.reader)
            except ConnectionResetError:
                continue
            except OSError:  # nothing more: all it ever wrote has been there since it died
                return
            if frame is None:
                self._drop_foreign(seat)
            elif not isinstance(frame, Frame):
                return
            else:
                self._arrive(seat, frame)

    def _drop_foreign(self, seat: Seat) -> None:
        self.dropped += 1
        if not seat.foreign:
            seat.foreign = True
            self._on_foreign(seat.rank)

    def _arrive(self, seat: Seat, frame: Frame) -> None:
        if frame.incarnation != seat.incarnation or frame.call_id not in seat.sent:
            frame.drop()
            self.dropped += 1
            return
        if frame.kind == Kind.ITEM:
            self._keep_item(seat, frame)
            return
        call = seat.sent.pop(frame.call_id)
        if seat.limits:
            seat.limits.pop(frame.call_id, None)
        self._unanswered -= 1
        if self._idle:
            self._wake_idle()
        if call is None or call.done or call.wire != frame.call_id:
            frame.drop()
            self.dropped += 1
        elif frame.kind == Kind.ERROR:
            if call.shape is Shape.GATHER:
                self._answer(call, seat.rank, frame)
            else:
                self._refuse_one(call, seat.rank, frame)
        elif frame.kind == Kind.REPLY:
            self._answer(call, seat.rank, frame)
        else:
            frame.drop()
        if self._turns or self._pool or self._alone[seat.rank]:
            self._pump()

    def _answer(self, call: Call, rank: int, answer: Frame | Outcome) -> None:
        call.answers[rank] = answer
        call.missing.discard(rank)
        if not call.missing and call.failed is None:
            self._settle(call)

    def _refuse_one(self, call: Call, rank: int, frame: Frame) -> None:
        """Fail *call* with what *rank* raised, unless that may be the echo of a death.

        A killed rank's connections close before its process is seen to end: in three of eight
        kills (gloo, four ranks) a survivor's "connection closed by peer" was here first. It would
        have passed for the survivor's own exception, and a call to be retried would have failed.
        Where every rank has raised, none of them has died of it.
        """
        call.missing.discard(rank)
        if call.failed is None:
            call.failed = (frame, rank)
        if call.shape is not Shape.COLLECTIVE or not frame.flags & Flag.JOINED:
            self._fail(call)
            return
        wire = call.wire
        _, raised = self._doubtful.setdefault(wire, (call, set()))
        raised.add(rank)
        if len(raised) == len(self._seats):
            self._fail(call)
        elif len(raised) == 1:
            self._hub.call_at(time.monotonic() + _DOUBT, lambda: self._end_doubt(call, wire))

    def _end_doubt(self, call: Call, wire: int) -> None:
        with self._lock:
            if wire in self._doubtful and not call.done:
                self._fail(call)
                self._pump()

    def _fail(self, call: Call) -> None:
        self._settle(call)
        self._forget(call)

    # --- settling (all of it under the lock) ----------------------------------------------

    def _settle(self, call: Call, *, error: BaseException | None = None) -> None:
        if call.done:
            return
        call.error = error
        call.done = True
        self._doubtful.pop(call.wire, None)
        call.drop()
        if call.timer is not None:
            call.timer.cancel()
        self._reading.wake(call)
        for then in call.settled:
            then(call)
        call.settled.clear()
        if call.stream is not None:
            self._end_stream(call)

    def _forget(self, call: Call) -> None:
        """Void the answers that are still to come, and take it out of the queues."""
        if call.wire:
            for seat in self._seats:
                if seat is not None and call.wire in seat.sent:
                    seat.sent[call.wire] = None
        elif call.shape is Shape.POOL:
            with contextlib.suppress(ValueError):
                self._pool.remove(call)
        elif call.shape is Shape.SINGLE:
            assert call.rank is not None
            with contextlib.suppress(ValueError, IndexError):
                self._alone[call.rank].remove(call)
        else:
            with contextlib.suppress(ValueError):
                self._turns.remove(call)

    def _lose_part(
        self, call: Call, lost: Iterable[Seat], error: Callable[[Call], BaseException]
    ) -> None:
        for seat in lost:
            if seat.rank in call.missing and call.wire in seat.sent:
                outcome = Outcome(seat.rank, OutcomeKind.DEAD, error=error(call))
                self._answer(call, seat.rank, outcome)

    def _calls(self) -> Iterator[Call]:
        """Every call that is not settled; some more than once."""
        for seat in self._seats:
            if seat is not None:
                for call in list(seat.sent.values()):
                    if call is not None and not call.done:
                        yield call
        yield from [call for call, _ in self._doubtful.values()]
        for queue in (self._turns, self._pool, *self._alone):
            yield from list(queue)

    def _seat(self, rank: int, incarnation: int) -> Seat | None:
        seat = self._seats[rank] if rank < len(self._seats) else None
        return seat if seat is not None and seat.incarnation == incarnation else None

    def _unwatch(self, seat: Seat) -> None:
        fd = seat.sock.fileno()
        if self._by_fd.get(fd) is seat:
            del self._by_fd[fd]
            self._reading.remove(fd)

    def _wake_idle(self) -> None:
        if not self._unanswered:
            for event in self._idle:
                event.set()
            self._idle.clear()


def _free(seat: Seat) -> None:
    ledger.disown(seat.sock.fileno())
    seat.sock.close()
    seat.board.close()
    seat.exchange.close()
