"""One rank's place in a group: the incarnation that sits in it, and what it owes.

Guarantees: every call an incarnation has been sent stays on its list until it is answered or the
incarnation is gone; a call that was settled without it stays as an empty entry, so its late answer
is known for what it is.

Left to others: the way to it (`runtime.channel`), what its answers mean (`settling`). Everything
here is under the plane's lock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phalanx.runtime import Channel

    from .call import Call
    from .plane import Latch


Noted: TypeAlias = "tuple[str, int, float | None]"


@dataclass(frozen=True, slots=True)
class Running:
    """A rank that owes answers, and the call it is in.

    Attributes:
        method: What it runs; empty for nothing.
        limit: For how many seconds it may; None for no limit.
        shortest: The least limit of anything it has been sent; None for none.
        began: When it began that, in seconds on the monotonic clock; 0.0 for nothing, and for a
            stream that waits for its taker.
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
        abandoned: Whether that call has been settled without it.
    """

    method: str | None = None
    call: int | None = None
    running: float | None = None
    served: int = 0
    queued: int = 0
    abandoned: bool = False

    @property
    def doing(self) -> str:
        """That as a text; empty for no call."""
        if self.method is None:
            return ""
        what = f"an abandoned call, {self.method}," if self.abandoned else self.method
        return what if self.running is None else f"{what} for {self.running:.1f} s"


@dataclass(slots=True)
class Seat:
    """One rank's place in the group, and the incarnation that sits in it.

    Attributes:
        sent: What this incarnation has been sent and not yet answered, by wire id; None where
            the call has been settled without it.
        noted: Of what it has been sent, the calls that have a limit, or were settled without it:
            name, number, and seconds that each may run or None.
        saving_limit: Seconds it may take to store its state with a call; None for no limit.
        ended: Its stream has ended, or its calls have been lost: it is sent nothing more.
        ending: It has said that it is about to end.
        leaving: It has been told to leave its process group for that of another epoch.
        foreign: Its channel has brought something that is no message.
    """

    rank: int
    incarnation: int
    channel: Channel
    sent: dict[int, Call | None] = field(default_factory=dict[int, "Call | None"])
    noted: dict[int, Noted] = field(default_factory=dict[int, "Noted"])
    saving_limit: float | None = None
    ended: bool = False
    ending: bool = False
    leaving: bool = False
    foreign: bool = False

    def has_room(self, depth: int) -> bool:
        """Whether it may be sent another call, where *depth* may be under way."""
        return len(self.sent) < depth and not self.ended and not self.channel.backed_up

    def has_begun(self, wire: int) -> bool:
        """Whether it has been sent *wire* and has begun it."""
        return wire in self.sent and wire <= self.channel.board.begun

    def has_left(self, wire: int) -> bool:
        """Whether its turn in the call *wire* is over; the answer may be computed still."""
        return wire not in self.sent or wire <= self.channel.board.finished

    def progress(self) -> Progress:
        """Return what it is doing, or was when it died."""
        board = self.channel.board
        begun, running = board.begun, board.begun > board.finished
        call = self.sent.get(begun) if running else None
        name = number = None
        if call is not None:
            name, number = call.name, call.seq
        elif running and begun in self.noted:
            name, number, _ = self.noted[begun]
        return Progress(
            method=name if name is None or board.saving != begun else f"checkpoint behind {name}",
            call=number,
            abandoned=name is not None and call is None,
            running=time.monotonic() - board.begun_at if running and board.begun_at else None,
            served=board.served,
            queued=sum(1 for wire in self.sent if wire > begun),
        )

    def running(self, *, spoke: bool) -> Running:
        """Return what it is in; see `Running.spoke`."""
        board = self.channel.board
        wire, idle = board.begun, board.begun <= board.finished
        method, _, limit = self.noted.get(wire, ("", 0, None))
        call = self.sent.get(wire)
        if call is not None:
            method = call.name
        if board.saving == wire:
            method, limit = f"checkpoint behind {method or 'a call'}", self.saving_limit
        began = 0.0 if idle else board.begun_at
        return Running(
            self.rank,
            self.incarnation,
            "" if idle else method,
            limit if began else None,  # a stream that waits for its taker has all the time
            self._shortest(),
            began,
            spoke,
        )

    def _shortest(self) -> float | None:
        limits = [limit for *_, limit in self.noted.values() if limit is not None]
        if self.saving_limit is not None:
            limits.append(self.saving_limit)
        return min(limits, default=None)


class Seats:
    """All seats of one group, by rank.

    Attributes:
        by_rank: One entry for each rank; None where nobody sits just now.
        all: The same, where somebody sits in each; else empty.
        ranks: The ranks of those.
        owed: How many answers are owed by all of them together.
    """

    def __init__(self, size: int) -> None:
        self.by_rank: list[Seat | None] = [None] * size
        self.all: tuple[Seat, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self.owed = 0
        self._by_fd: dict[int, Seat] = {}
        self._idle: list[Latch] = []

    def __len__(self) -> int:
        return len(self.by_rank)

    def __iter__(self) -> Iterator[Seat]:
        """Iterate over the seats that are taken."""
        return (seat for seat in self.by_rank if seat is not None)

    def find(self, rank: int, incarnation: int) -> Seat | None:
        """Return the seat of *rank* if that incarnation sits in it."""
        seat = self.at(rank)
        return seat if seat is not None and seat.incarnation == incarnation else None

    def at(self, rank: int) -> Seat | None:
        """Return the seat of *rank*, if there is one and it is taken."""
        return self.by_rank[rank] if 0 <= rank < len(self.by_rank) else None

    def reading(self, fd: int) -> Seat | None:
        """Return whose channel *fd* is, while it is read."""
        return self._by_fd.get(fd)

    def resize(self, size: int) -> None:
        """Have *size* seats; those beyond must be empty."""
        self.by_rank = (self.by_rank + [None] * size)[:size]
        self._note()

    def take(self, seat: Seat) -> None:
        """Have *seat* in its rank's place."""
        self.by_rank[seat.rank] = seat
        self._by_fd[seat.channel.fileno()] = seat
        self._note()

    def leave(self, seat: Seat) -> None:
        """Have nobody in *seat*'s place."""
        self.by_rank[seat.rank] = None
        self._note()

    def unread(self, seat: Seat) -> bool:
        """Forget *seat*'s descriptor, which is read no more; return False if that was done."""
        fd = seat.channel.fileno()
        if self._by_fd.get(fd) is not seat:
            return False
        del self._by_fd[fd]
        return True

    def clear(self) -> None:
        """Have none any more."""
        self.by_rank = []
        self._by_fd.clear()
        self._note()

    # --- what they owe --------------------------------------------------------------------

    def owe(self, seats: Sequence[Seat], wire: int, call: Call) -> None:
        """Note that *seats* are about to be sent *call* as *wire*."""
        self.owed += len(seats)
        for seat in seats:
            seat.sent[wire] = call
        if call.hang_after is not None:
            noted = (call.name, call.seq, call.hang_after)
            for seat in seats:
                seat.noted[wire] = noted

    def pay(self, seat: Seat, wire: int) -> Call | None:
        """Strike *wire*, which *seat* owes, off its list; return its call, if it is not settled."""
        call = seat.sent.pop(wire)
        self.owed -= 1
        if seat.noted:
            seat.noted.pop(wire, None)
        if self._idle:
            self.tell_idle()
        return call

    def write_off(self, seat: Seat) -> None:
        """Strike everything off *seat*'s list."""
        self.owed -= len(seat.sent)
        seat.sent.clear()
        seat.noted.clear()

    def when_idle(self, latch: Latch) -> None:
        """Set *latch* once nobody owes an answer."""
        self._idle.append(latch)
        self.tell_idle()

    def tell_idle(self) -> None:
        """Look whether anybody still owes an answer, if somebody waits for that."""
        if self._idle and not self.owed:
            idle, self._idle = self._idle, []
            for latch in idle:
                latch.set()

    def _note(self) -> None:
        taken = tuple(self)
        self.all = taken if len(taken) == len(self.by_rank) else ()
        self.ranks = tuple(seat.rank for seat in self.all)
