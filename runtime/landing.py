"""Where a large body lies while it arrives piece by piece: in an arena, or in a file of its own.

Guarantees: there is memory behind the place before the first piece is written; what is not
finished leaves nothing behind.

Left to others: the pieces (`line`), and what becomes of the whole message (`frames`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .far import new_message_file, seal_message_file
from .payload import Payload

if TYPE_CHECKING:
    from .arena import Arena


class Landing:
    """The place of one body.

    Attributes:
        missing: Bytes that have yet to come.
    """

    def __init__(self, size: int, arena: Arena | None) -> None:
        """Find a place for *size* bytes; without an *arena* in a file.

        Raises:
            MessageTooLarge: this machine has no memory for it.
        """
        self.missing = size
        self._size = size
        self._extent = None if arena is None else arena.place(size)
        self._file = new_message_file(size) if self._extent is None else None

    def write(self, piece: memoryview) -> None:
        """Put the next piece down.

        Raises:
            ValueError: it is longer than what is missing.
            OSError: the machine has run out of memory meanwhile.
        """
        if not 0 < piece.nbytes <= self.missing:
            msg = f"a piece of {piece.nbytes} bytes where {self.missing} are missing"
            raise ValueError(msg)
        at = self._size - self.missing
        if self._extent is not None:
            self._extent.write([piece], [at])
        elif self._file is not None:
            done = 0
            while done < piece.nbytes:
                done += os.pwrite(self._file, piece[done:], at + done)
        self.missing -= piece.nbytes

    def payload(self) -> Payload:
        """Return the whole body, which is the caller's to close from now on."""
        extent, self._extent = self._extent, None
        file, self._file = self._file, None
        if extent is not None:
            return Payload.in_arena(extent, self._size)
        assert file is not None
        return Payload.in_file(seal_message_file(file), self._size)

    def close(self) -> None:
        """Give the place up."""
        if self._extent is not None:
            self._extent.let_go()
            self._extent = None
        if self._file is not None:
            os.close(self._file)
            self._file = None
