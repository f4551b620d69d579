"""Buffer for the output of a node's ranks, until it is sent to the driver.

- It is read at once, so no rank waits for the network. If the buffer is full the oldest is dropped.
- Little of it is in flight to the driver, so that beats on the same link are not delayed.
- The last output of a rank is there when its end is reported.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from functools import partial
from select import EPOLLIN
from typing import TYPE_CHECKING

from phalanx.cluster.link.messages import Output
from phalanx.runtime import descriptors, read_crash_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import EventLoop, Timer, Watch

_KEPT = 64 * 1024  # bytes of each stream that wait to be sent; older ones are dropped
_PIECE = 8 * 1024  # bytes in a message: as JSON six times as many, and less than its limit
_RECORD = 256 * 1024  # bytes of a log record, which has a lower limit of its own
_LAST_PIECES = 1024  # read after its end: what it has left, though others write on
_EVERY = 0.05  # seconds between two rounds of messages
_MESSAGES = 16  # of a rank in one round
_UNDER_WAY = 16  # messages of all ranks that the driver has not taken


class OutputWindow:
    """How many messages of all ranks of a node may be under way: as many as cross in time.

    Thread-safe. Times are monotonic.

    Args:
        pace: Seconds that one may take.
    """

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._lock = threading.Lock()
        self._sent: deque[float] = deque()
        self._limit = 1

    @property
    def has_room(self) -> bool:
        """Whether another may be sent."""
        return len(self._sent) < self._limit

    def sent(self, now: float) -> None:
        """Note that one is under way."""
        with self._lock:
            self._sent.append(now)

    def taken(self, now: float) -> None:
        """Note that the driver has the first of them."""
        with self._lock:
            is_late = now - self._sent.popleft() > self._pace
            self._limit = max(1, self._limit // 2) if is_late else min(self._limit + 1, _UNDER_WAY)


class _Stream:
    """The buffered output of one stream."""

    def __init__(self) -> None:
        self.pieces: deque[bytes] = deque()
        self.size = self.dropped = 0

    def put(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            self.pieces.append(data[start : start + _PIECE])
        self.size += len(data)
        while self.size > _KEPT:
            self.dropped += len(self.take())

    def take(self) -> bytes:
        self.size -= len(self.pieces[0])
        return self.pieces.popleft()


class RankOutput:
    """The ends that one rank writes to.

    Args:
        send: Called with each message, on any thread.
        window: Of its node. What a rank wrote last is sent whether there is room or not.

    Attributes:
        stdout: The rank's end, for its descriptor 1; *stderr* likewise for 2.
        faults: A memfd for its last words and its stacks.
    """

    def __init__(
        self,
        loop: EventLoop,
        rank: int,
        incarnation: int,
        send: Callable[[Output], None],
        window: OutputWindow,
    ) -> None:
        self._loop = loop
        self._who = {"rank": rank, "incarnation": incarnation}
        self._send = send
        self._window = window
        self._lock = threading.Lock()
        self._timer: Timer | None = None
        self._start_reported = self._is_closed = False
        self._watches: list[Watch] = []
        with contextlib.ExitStack() as made:
            out, self.stdout = (descriptors.own(end, made) for end in os.pipe2(os.O_CLOEXEC))
            err, self.stderr = (descriptors.own(end, made) for end in os.pipe2(os.O_CLOEXEC))
            log, self._log = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            log_fd = descriptors.own(log.detach(), made)
            self._log_end = descriptors.own(self._log.detach(), made)
            self.faults = descriptors.own(os.memfd_create("phalanx-crash-output"), made)
            made.pop_all()
        self._streams = {out: _Stream(), err: _Stream(), log_fd: _Stream()}
        self._names = dict(zip(self._streams, ("stdout", "stderr", "log"), strict=True))
        self._ends = [self.stdout, self.stderr, self._log_end]
        for fd in self._streams:
            os.set_blocking(fd, False)
            self._watches.append(loop.watch(fd, EPOLLIN, partial(self._on_readable, fd)))

    def child_fds(self) -> dict[str, int]:
        """Return what the rank is started with beside its stdout and stderr, by name."""
        return {"log": self._log_end, "faults": self.faults}

    def close_child_ends(self) -> None:
        """Close the rank's ends here, once it has them, or never will."""
        while self._ends:
            descriptors.close(self._ends.pop())

    def begin(self) -> None:
        """Send present and future output: the rank has been reported to the driver."""
        with self._lock:
            self._start_reported = True
        self._loop.post(self._plan)

    def finish(self) -> None:
        """Send all that the rank, which has ended, has written."""
        for watch in self._watches:
            watch.cancel()
        for fd in self._streams:
            for _ in range(_LAST_PIECES):
                if not self._read(fd):
                    break
        while self._round(is_last=True):
            pass

    def last_words(self, stacks_from: int | None) -> tuple[str, str]:
        """Return its last words, and the stacks behind *stacks_from* bytes; None for no stacks."""
        words = read_crash_output(self.faults, end=stacks_from)
        return words, "" if stacks_from is None else read_crash_output(self.faults, stacks_from)

    def close(self) -> None:
        """Give everything back."""
        for watch in self._watches:
            watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self.close_child_ends()
        with self._lock:
            self._is_closed = True  # a number may be another's from now on
        for fd in (*self._streams, self.faults):
            descriptors.close(fd)

    # --- inside -----------------------------------------------------------------------------

    def _on_readable(self, fd: int, _events: int) -> None:
        if self._read(fd) is False:
            self._watches[list(self._streams).index(fd)].cancel()
        self._plan()

    def _read(self, fd: int) -> bool | None:
        """Read a piece, for others wait too; return None if nothing is there, False at the end."""
        size = _RECORD if self._names[fd] == "log" else _KEPT
        with self._lock:
            try:
                data = b"" if self._is_closed else os.read(fd, size)
            except BlockingIOError:
                return None
            except OSError:
                return False
            if not data:
                return False
            if self._names[fd] == "log":
                data += b"\n"  # separates records at the other end
            self._streams[fd].put(data)
            return True

    def _plan(self) -> None:
        if self._start_reported and (self._timer is None or not self._timer.is_pending):
            self._timer = self._loop.call_at(time.monotonic() + _EVERY, self._due)

    def _due(self) -> None:
        if self._round():
            self._plan()

    def _round(self, *, is_last: bool = False) -> bool:
        """Send some of what waits; return whether more does."""
        for _ in range(_MESSAGES):
            if not (self._window.has_room or is_last):
                break
            with self._lock:
                fd = next((fd for fd, each in self._streams.items() if each.pieces), None)
                if fd is None:
                    return False
                stream = self._streams[fd]
                dropped, stream.dropped = stream.dropped, 0
                text = stream.take().decode("utf-8", "surrogateescape")
                self._window.sent(time.monotonic())
                # With the lock: `finish`, on another thread, sends nothing before this.
                name = self._names[fd]
                self._send(Output(**self._who, stream=name, text=text, dropped=dropped))
        return True
