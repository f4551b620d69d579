"""A body on its way out: encoded once, sent as often and to as many as it must.

Guarantees: a large body is copied when the payload is made, into the sender's arena or a memory
file of its own; `close` lets go of it, and who has been sent it keeps it.

Left to others: how large bodies are laid out (`far`), and sending (`frames.send`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .far import lay_buffers_out, lay_out, write_file
from .wire import EVERY_RANK, HEADER, IN_ARENA, IN_FILE, INLINE_LIMIT, MAGIC, Flag, Kind

if TYPE_CHECKING:
    from .arena import Arena, Borrower, Extent
    from .codec import Encoded

_write_head = HEADER.pack


@dataclass(slots=True)
class Payload:
    """A body ready to be sent, as often and to as many as it must.

    Attributes:
        tail: What follows the header: the body, or where a large one lies.
        file: The memory file of a large body that lies in one of its own, or None.
        extent: The place of one that lies in an arena, or None.
    """

    flags: int
    tail: bytes
    file: int | None = None
    extent: Extent | None = None

    @classmethod
    def of(cls, encoded: Encoded | None, arena: Arena | None = None) -> Payload:
        """Return *encoded* as a payload; a large one is copied now: later changes do not show.

        Raises:
            MessageTooLarge: there is not memory enough for it; nothing was written.
        """
        if encoded is None:
            return cls(Flag.NONE, b"")
        if not encoded.buffers and (small := encoded.small(INLINE_LIMIT)) is not None:
            return cls(Flag.NONE, small)
        beside = lay_buffers_out(encoded, INLINE_LIMIT)
        near, parts, offsets, size = (b"", *lay_out(encoded)) if beside is None else beside
        extent = arena.place(size) if arena is not None else None
        if extent is None:
            return cls.in_file(write_file(parts, offsets, size), size, near)
        try:
            extent.write(parts, offsets)
        except BaseException:
            extent.let_go()
            raise
        return cls.in_arena(extent, size, near)

    @classmethod
    def in_arena(cls, extent: Extent, size: int, near: bytes = b"") -> Payload:
        """Return the *size* bytes that have been written to *extent*, with *near* beside them."""
        tail = IN_ARENA.pack(extent.slot, extent.start, size) + near
        return cls(Flag.ARENA, tail, extent=extent)

    @classmethod
    def in_file(cls, file: int, size: int, near: bytes = b"") -> Payload:
        """Return the *size* bytes in a sealed memory file, which is closed with the payload."""
        return cls(Flag.FILE, IN_FILE.pack(size) + near, file)

    def lend(self, borrower: Borrower) -> None:
        """Count the message as read by *borrower*; before each time it is sent."""
        if self.extent is not None:
            self.extent.lend(borrower)

    def take_back(self, borrower: Borrower) -> None:
        """Count it as not read by *borrower*, for it could not be sent."""
        if self.extent is not None:
            borrower.take_back(self.extent.slot)

    def packet(
        self,
        kind: int,
        *,
        epoch: int,
        call_id: int,
        incarnation: int = 0,
        extra: int = EVERY_RANK,
        flags: int = Flag.NONE,
    ) -> bytes:
        """Return the packet; `file` must ride on it."""
        flags |= self.flags
        return _write_head(MAGIC, kind, flags, epoch, call_id, incarnation, extra) + self.tail

    def close(self) -> None:
        """Let go of the memory; who has been sent it keeps it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None
        if self.extent is not None:
            self.extent.let_go()
            self.extent = None


def call_packet(  # noqa: PLR0917  # as they stand in the header
    payload: Payload, flags: int, epoch: int, call_id: int, round_: int, extra: int
) -> bytes:
    """Return the packet of a call: what `Payload.packet` makes, more quickly."""
    flags |= payload.flags
    return _write_head(MAGIC, Kind.CALL, flags, epoch, call_id, round_, extra) + payload.tail
