"""One end of a sequenced-packet socket in a process that must never block on it.

Guarantees: packets leave in the order in which they were sent; those without room wait, and are
counted when they have left, so that the sender can be slowed down.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptor_limit
from phalanx.runtime.wire.packet_decoder import Frame, receive, send, unbundle
from phalanx.runtime.wire.packet_header import Kind
from phalanx.supervision import RuntimeFault

from .zeromq import IN, OUT

if TYPE_CHECKING:
    from phalanx.runtime.memory.mapping import ArenaReader


class BufferedSocket:
    """The socket *fd*, which belongs to this object from now on.

    Attributes:
        fd: Its number; -1 once it is closed.
        ended: The other side has closed its end, and everything it wrote has been read.
    """

    def __init__(self, fd: int, reader: ArenaReader | None = None) -> None:
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)
        self._reader = reader
        self._waiting: deque[tuple[bytes, int | None, int]] = deque()
        self._ahead: deque[Frame] = deque()  # of a packet that held several
        self.fd = fd
        self.ended = False

    @property
    def is_backed_up(self) -> bool:
        """Whether packets wait for room."""
        return bool(self._waiting)

    def wanted(self, *, reads: bool = True) -> int:
        """Return what to wait for at this end: something to read, if *reads*, and room to send."""
        if self.ended:
            return 0
        return (IN if reads else 0) | (OUT if self._waiting else 0)

    def send(self, packet: bytes, file: int | None = None, *, counts: int = 0) -> int:
        """Send *packet*, on which *file* rides; return *counts*, or 0 where it has to wait.

        Raises:
            RuntimeFault: it would have to wait, and no descriptor is free to keep its file.
        """
        if not self._waiting and self._sent(packet, file):
            return counts
        if file is not None:
            try:
                with descriptor_limit.all_available():
                    file = os.dup(file)
            except OSError as error:
                raise RuntimeFault(f"a message was lost: {error}; raise `ulimit -n`") from error
        self._waiting.append((packet, file, counts))
        return 0

    def flush(self) -> int:
        """Send what waits, as far as there is room; return what that counts."""
        left = 0
        while self._waiting and self._sent(*self._waiting[0][:2]):
            _, file, counts = self._waiting.popleft()
            if file is not None:
                os.close(file)
            left += counts
        return left

    def receive(self) -> Frame | None:
        """Return the next frame, or None where none is there now; see `ended`."""
        if self._ahead:
            return self._ahead.popleft()
        while self.fd >= 0 and not self.ended:
            try:
                frame = receive(self._sock, self._reader)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # it died with unread input; what it wrote before follows
            except OSError:
                break
            if isinstance(frame, Frame):
                if frame.kind != Kind.BUNDLE:
                    return frame
                frames = unbundle(frame, self._reader)
                if frames is not None:
                    self._ahead.extend(frames[1:])
                    return frames[0]
            elif frame is not None:  # else none of ours
                break
        if not self.ended:
            self.ended = True
        return None

    def finish(self) -> None:
        """Let the other side read to the end of file; it can still be seen to close its own."""
        if self.fd >= 0:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                return  # it has closed already

    def close(self) -> None:
        """Give the socket back."""
        self.fd = -1
        self.ended = True
        self._sock.close()
        for _, file, _ in self._waiting:
            if file is not None:
                os.close(file)
        self._waiting.clear()

    def _sent(self, packet: bytes, file: int | None) -> bool:
        """Whether *packet* needs to be kept no longer; to one that is gone it goes nowhere."""
        try:
            send(self._sock, packet, file)
        except OSError as error:
            return not isinstance(error, BlockingIOError)
        return True
