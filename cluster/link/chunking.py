"""Splits long messages to a node into pieces, between which the answers to its beats pass.

- Long messages keep their order, and so do short ones, which overtake those. The next piece leaves
  when the node has taken the one before, so at most one piece is buffered.
- The rest of a withdrawn launch is not sent.
- The size of a piece follows the measured rate: it crosses in about the time between two beats.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .messages import Launch, MalformedMessage, Piece, Withdraw, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .messages import Message

_LEAST = 16 * 1024  # bytes of a piece; what is shorter goes whole
_MOST = 1024 * 1024  # a link may slow down while one is under way


class Outbox:
    """The messages to be sent to one node.

    Args:
        pace: Seconds that a piece may take.
    """

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._short: deque[Sequence[bytes]] = deque()
        self._long: deque[tuple[int, Sequence[bytes]]] = deque()  # with the number of a launch
        self._rest = memoryview(b"")  # of the message that is being sent
        self._launch = 0  # which that is
        self._sizes: tuple[int, ...] = ()
        self._size = _LEAST
        self._sent_at: float | None = None  # the piece that has not been taken

    def put(self, parts: Sequence[bytes]) -> None:
        """Have the message of *parts* sent."""
        message = decode(parts)
        if isinstance(message, Withdraw):
            self._withdraw(message.number)
        if sum(map(len, parts)) <= _LEAST:
            self._short.append(parts)
        else:
            self._long.append((message.number if isinstance(message, Launch) else 0, parts))

    def _withdraw(self, launch: int) -> None:
        self._long = deque(each for each in self._long if each[0] != launch)
        if self._rest and self._launch == launch:
            self._rest, self._sizes = memoryview(b"-"), (0,)  # so its pieces make no message

    def next(self, now: float) -> Sequence[bytes] | None:
        """Return the parts of what is to be sent now; None for nothing."""
        if self._short:
            return self._short.popleft()
        if self._sent_at is not None:
            return None
        if not self._rest:
            if not self._long:
                return None
            self._launch, parts = self._long.popleft()
            self._sizes = tuple(map(len, parts))
            self._rest = memoryview(b"".join(parts))
        piece, rest = bytes(self._rest[: self._size]), self._rest[self._size :]
        self._rest = rest or memoryview(b"")  # an empty part of it would keep the whole message
        self._sent_at = now
        return encode(Piece(data=piece, sizes=() if self._rest else self._sizes))

    def taken(self, now: float) -> None:
        """Note that the node has taken the last piece."""
        if self._sent_at is not None:
            took, self._sent_at = now - self._sent_at, None
            size = 2 * self._size if took < self._pace / 2 else self._size
            self._size = min(max(size // 2 if took > self._pace else size, _LEAST), _MOST)


class Inbox:
    """The pieces that have come of one message."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def put(self, piece: Piece) -> Message | None:
        """Return the message that *piece* completes; None if more is to come.

        Raises:
            MalformedMessage: the pieces make none.
        """
        self._pieces.append(piece.data)
        if not piece.sizes:
            return None
        whole, parts, start = memoryview(b"".join(self._pieces)), list[bytes](), 0
        self._pieces.clear()
        for size in piece.sizes:
            parts.append(bytes(whole[start : start + size]))
            start += size
        if start != len(whole):
            raise MalformedMessage("its parts are not as long as was said")
        return decode(parts)
