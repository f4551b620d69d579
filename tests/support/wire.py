"""A wire between two network interfaces, both of which it makes: ``wire.py HERE THERE``.

Orders come line by line on standard input, and are acknowledged by the line ``done``: the seconds
by which what goes there is delayed, and what comes back; ``inf`` loses it. The interfaces stay up,
as on a cable that is cut somewhere else.

For kernels without ``netem``, and without a program that sets up rules: two taps and a loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
TAP, NO_HEADER = 0x0002, 0x1000
FRAME = 65_536
AT_ONCE = 64


def tap(name: str) -> int:
    """Make an interface; return what reads and writes its frames."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_HEADER))
    return fd


class Way:
    """One direction. Frames keep their order."""

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.delay = 0.0
        self.held: deque[tuple[float, bytes]] = deque()

    def read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = os.read(self.source, FRAME)
            except OSError:  # none is there
                return
            if self.delay < math.inf:
                self.held.append((time.monotonic() + self.delay, frame))

    def write(self) -> None:
        while self.held and self.held[0][0] <= time.monotonic():
            _, frame = self.held.popleft()
            with contextlib.suppress(OSError):  # it is not up yet, or has no room: frames get lost
                os.write(self.sink, frame)


def main(here: str, there: str) -> None:
    ends = tap(here), tap(there)
    ways = Way(*ends), Way(*reversed(ends))
    print("ready", flush=True)
    while True:
        due = min((way.held[0][0] for way in ways if way.held), default=math.inf)
        wait = None if due == math.inf else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([*ends, 0], [], [], wait)
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            for way, word in zip(ways, line.split(), strict=True):
                way.delay = float(word)
                if way.delay == math.inf:
                    way.held.clear()
            print("done", flush=True)
        for way in ways:
            if way.source in ready:
                way.read()
            way.write()


main(*sys.argv[1:])
