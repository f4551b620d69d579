"""From chunks of bytes to lines.

Guarantees: every byte comes out exactly once, in order; a line is never held back once it is
complete; what is held back is bounded, since a line past the limit comes out in pieces.
"""

from __future__ import annotations

from typing import Final

MAX_LINE: Final = 65536


class LineSplitter:
    """Splits one stream at newlines."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        self._limit = limit
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that *data* completes, without their newlines."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._partial) + lines[0]
            self._partial.clear()
        self._partial += rest
        while len(self._partial) > self._limit:
            lines.append(bytes(self._partial[: self._limit]))
            del self._partial[: self._limit]
        return lines

    def flush(self) -> list[bytes]:
        """Return the line that was begun and not ended, if there is one."""
        if not self._partial:
            return []
        line = bytes(self._partial)
        self._partial.clear()
        return [line]
