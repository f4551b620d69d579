"""Sending, receiving and waiting with ZeroMQ, without what its Python helpers cost.

Those pass flags and options as enums, and ask for each part whether another follows: together a
third of the processor time of an empty call over a link. Here flags are plain numbers.
"""

from __future__ import annotations

import itertools
import math
import select
import struct
from typing import TYPE_CHECKING

import zmq

from phalanx.runtime.linux.syscalls import keep_freed_memory, return_freed_memory

from .link import LARGEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IN = int(select.EPOLLIN)
OUT = int(select.EPOLLOUT)

_KEPT = 16 * 1024 * 1024  # bytes: a window of pieces, twice
_IDLE = 2.0  # seconds
_LARGE = 16 * 1024  # bytes of a part, from which on a message counts as large

_EVENT = struct.Struct("=Hi")  # as zmq_socket_monitor(3) has it
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)


class MessageSocket:
    """A ZeroMQ socket that is used without waiting. Used by one thread.

    Its descriptor tells only that something has happened since the socket was last asked, and any
    use of it may take the notice: so `has_more` has to be asked before each wait.

    Args:
        memory: That of large messages; see there.

    Attributes:
        fd: Readable when something has happened.
    """

    def __init__(self, sock: zmq.Socket[bytes], memory: MessageMemory | None = None) -> None:
        self.fd = int(sock.get(zmq.FD))
        self._sock = sock
        self._memory = memory
        self._is_drained = False  # nothing was there, and there has been no use since

    def has_more(self) -> bool:
        """Return whether there is a message; one that comes later makes the descriptor readable."""
        if self._is_drained:
            return False
        self._is_drained = not int(self._sock.get(_EVENTS)) & _READABLE
        return not self._is_drained

    def post(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send a message of *parts*.

        Raises:
            zmq.ZMQError: it cannot be sent now, or there is nobody to receive it.
        """
        self._is_drained = False
        if self._memory is not None and len(parts[-1]) > _LARGE:
            self._memory.is_used = True
        for part in parts[:-1]:
            self._sock.send(part, _MORE)
        self._sock.send(parts[-1], _NOW)

    def receive(self) -> list[zmq.Frame] | None:
        """Return the parts of the next message; None where there is none."""
        self._is_drained = False
        try:
            part = self._sock.recv(_NOW, copy=False)
        except zmq.Again:
            self._is_drained = True
            return None
        parts = [part]
        while part.more:
            part = self._sock.recv(_NOW, copy=False)
            parts.append(part)
        if self._memory is not None and len(part) > _LARGE:
            self._memory.is_used = True
        return parts

    def messages(self, most: int | None = None) -> Iterator[list[zmq.Frame]]:
        """Return the messages that are there, *most* at most; None: all of them."""
        for _ in itertools.count() if most is None else range(most):
            message = self.receive()
            if message is None:
                return
            yield message
            if not self.has_more():
                return


def event_of(message: Sequence[bytes]) -> tuple[int, int]:
    """Return the event that a *message* of a monitor's socket tells, and its value.

    `zmq.utils.monitor` does the same, and imports asyncio.
    """
    event, value = _EVENT.unpack(message[0])
    return event, value


class Readiness:
    """Which of the descriptors of one thread are ready; like an epoll, which it owns."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, int] = {}

    def watch(self, fd: int, events: int) -> None:
        """Wait for *events* of *fd* from now on; 0: for none, not even its end."""
        known = self._watched.get(fd, 0)
        if events == known:
            return
        if not events:
            del self._watched[fd]
            self._epoll.unregister(fd)
            return
        self._watched[fd] = events
        if known:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        """Return each descriptor that is ready and its events, after *seconds* at most."""
        return self._epoll.poll(seconds)

    def close(self) -> None:
        """Give the epoll back."""
        self._epoll.close()


class MessageMemory:
    """The memory of ZeroMQ's large messages, of which each is copied several times on its way.

    It is kept from one to the next, and given back once there were none for `_IDLE` seconds: fresh
    pages from the kernel made a call with 8 MiB a fifth longer. One for a process.

    Attributes:
        is_used: Whether there was one since the last look.
    """

    def __init__(self) -> None:
        keep_freed_memory(2 * LARGEST, _KEPT)
        self.is_used = False
        self._trim_at = math.inf

    def trim_if_idle(self, now: float) -> None:
        """Give the memory back if it is not needed; to be called now and then."""
        if self.is_used:
            self.is_used, self._trim_at = False, now + _IDLE
        elif now >= self._trim_at:
            self._trim_at = math.inf
            return_freed_memory()
