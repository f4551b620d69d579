"""`RankSlot`: one rank of a group, its incarnation, and the calls it has not answered.

- A sent call stays on its slot's list until the rank has answered it, or is lost.
- For a call that is settled without a rank's answer a void one stays there (`Call.void`).

Guarded by the plane's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.runtime import Channel

    from .call import Call


@dataclass(frozen=True, slots=True)
class Progress:
    """The activity of a rank now, or when it died.

    Attributes:
        method: The call it has begun and not ended; empty for none.
        limit: For how many seconds it may run that; None for no limit.
        shortest: The least limit of any call it has been sent; None for none.
        began: When it began that, in seconds on the monotonic clock; 0.0 for nothing, and for a
            stream that waits for its consumer.
        spoke: Whether unread messages of it were there, so that it has just become free.
        running: For how many seconds it has run that; None if *began* is 0.0.
        call: That call's number; None for none.
        served: Calls this incarnation has ended.
        queued: Calls sent to it and not begun.
        owed: Calls sent to it and not answered.
        abandoned: Whether that call has been settled without it.
    """

    rank: int
    incarnation: int
    method: str = ""
    limit: float | None = None
    shortest: float | None = None
    began: float = 0.0
    spoke: bool = False
    running: float | None = None
    call: int | None = None
    served: int = 0
    queued: int = 0
    owed: int = 0
    abandoned: bool = False


@dataclass(slots=True)
class RankSlot:
    """One incarnation of one rank.

    Attributes:
        sent: The calls it has been sent and has not answered, by wire id.
        saving_limit: Seconds it may take to store its state with a call; None for no limit.
        ended: Its channel has ended, or its calls have been lost: it is sent nothing more.
        ending: It has announced its end.
        leaving: It has got the order to leave its process group for that of another epoch.
        sent_foreign_packet: Its channel has brought a packet that is no message.
    """

    rank: int
    incarnation: int
    channel: Channel
    sent: dict[int, Call] = field(default_factory=dict[int, "Call"])
    saving_limit: float | None = None
    ended: bool = False
    ending: bool = False
    leaving: bool = False
    sent_foreign_packet: bool = False

    def has_room(self, depth: int) -> bool:
        """Whether it may be sent another call, if *depth* may be in flight."""
        return len(self.sent) < depth and not self.ended and not self.channel.backed_up

    def has_begun(self, wire: int) -> bool:
        """Whether it has been sent *wire* and has begun it."""
        return wire in self.sent and wire <= self.channel.page.begun

    def progress(self, now: float, *, spoke: bool = False) -> Progress:
        """Return what it is doing *now*, or was doing when it died; see `Progress.spoke`."""
        page = self.channel.page
        begun, runs = page.begun, page.begun > page.finished
        began = page.begun_at if runs else 0.0
        call = self.sent.get(begun) if runs else None
        method, limit = ("", None) if call is None else (call.name, call.hang_after)
        if runs and page.saving == begun:
            method, limit = f"checkpoint behind {method or 'a call'}", self.saving_limit
        limits = [self.saving_limit, *[each.hang_after for each in self.sent.values()]]
        return Progress(
            self.rank,
            self.incarnation,
            method,
            limit if began else None,  # a stream that waits for its consumer has no limit
            min((each for each in limits if each is not None), default=None),
            began,
            spoke,
            running=now - began if began else None,
            call=None if call is None else call.seq,
            served=page.served,
            queued=sum(1 for wire in self.sent if wire > begun),
            owed=len(self.sent),
            abandoned=call is not None and call.done,
        )


class RankTable:
    """The slots of one group.

    Attributes:
        by_rank: One entry for each rank; None while no incarnation is attached.
        all: The same if every rank is attached; else empty.
        ranks: The ranks of those.
        by_fd: The slots whose channels are read, by descriptor.
        owed: How many answers all of them together have not given.
    """

    def __init__(self, size: int) -> None:
        self.by_rank: list[RankSlot | None] = [None] * size
        self.all: tuple[RankSlot, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self.by_fd: dict[int, RankSlot] = {}
        self.owed = 0

    def __len__(self) -> int:
        return len(self.by_rank)

    def __iter__(self) -> Iterator[RankSlot]:
        """Iterate over the slots with an incarnation."""
        return (slot for slot in self.by_rank if slot is not None)

    def find(self, rank: int, incarnation: int) -> RankSlot | None:
        """Return the slot of *rank* if that incarnation is attached."""
        slot = self.at(rank)
        return slot if slot is not None and slot.incarnation == incarnation else None

    def at(self, rank: int) -> RankSlot | None:
        """Return the slot of *rank*, if there is one with an incarnation."""
        return self.by_rank[rank] if 0 <= rank < len(self.by_rank) else None

    def resize(self, size: int) -> None:
        """Have *size* ranks; those beyond must be detached."""
        self.by_rank = (self.by_rank + [None] * size)[:size]
        self._refresh()

    def attach(self, slot: RankSlot) -> None:
        """Add *slot* at its rank."""
        self.by_rank[slot.rank] = slot
        self.by_fd[slot.channel.fileno()] = slot
        self._refresh()

    def detach(self, slot: RankSlot) -> None:
        """Remove *slot*."""
        self.by_rank[slot.rank] = None
        self._refresh()

    def clear(self) -> None:
        """Remove every rank."""
        self.by_rank = []
        self.by_fd.clear()
        self._refresh()

    def _refresh(self) -> None:
        taken = tuple(self)
        self.all = taken if len(taken) == len(self.by_rank) else ()
        self.ranks = tuple(slot.rank for slot in self.all)
