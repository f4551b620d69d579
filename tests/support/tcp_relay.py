"""Relays TCP connections under control: ``tcp_relay.py FROM_HOST PORT TO_HOST PORT``.

Orders come line by line on standard input, and are acknowledged by the line ``done``:

- ``mute WAY BYTES``: pass nothing more of the connections there are once so many more bytes have
  passed that *way* (``up``: from who connected; ``down``: to it; ``both``). None is closed, as by
  a cable that is cut. Later connections pass.
- ``cut WAY``: pass nothing more of any connection that way, later ones included.
- ``heal``: pass on again; what was sent meanwhile has waited, as it would for TCP's own patience.
- ``delay SECONDS``: let everything take that much longer, each way.
- ``replay WAY``: of each connection, pass on once more what passed last that way.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import deque

PIECE = 1 << 16
ROOM = 1 << 20  # bytes that may be on their way in one direction


class Way:
    """One direction of one connection."""

    def __init__(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        self.name = name
        self.source = source
        self.sink = sink
        self.held: deque[tuple[float, memoryview]] = deque()
        self.bytes = 0
        self.left: int | None = None  # bytes until it is mute
        self.last = b""
        self.ended = False

    @property
    def reads(self) -> bool:
        return not self.ended and self.left != 0 and self.bytes < ROOM

    def read(self, delay: float) -> bool:
        """Take what there is; False where it has ended."""
        most = PIECE if self.left is None else min(PIECE, self.left)
        try:
            data = self.source.recv(most)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return False
        if self.left is not None:
            self.left -= len(data)
        self.last = data
        self.hold(data, delay)
        return True

    def hold(self, data: bytes, delay: float = 0.0) -> None:
        self.bytes += len(data)
        self.held.append((time.monotonic() + delay, memoryview(data)))

    def write(self) -> None:
        while self.held and self.held[0][0] <= time.monotonic():
            due, data = self.held[0]
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                return
            except OSError:
                self.held.clear()
                return
            self.bytes -= sent
            self.held[0] = (due, data[sent:])
            if sent == len(data):
                self.held.popleft()


class Relay:
    def __init__(self, host: str, port: str, to_host: str, to_port: str) -> None:
        self.to = (to_host, int(to_port))
        self.listener = socket.create_server((host, int(port)))
        self.ways: list[Way] = []
        self.delay = 0.0
        self.cuts: set[str] = set()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def run(self) -> None:
        print("ready", flush=True)
        while True:
            self._want()
            for key, events in self.selector.select(0.005 if self.delay else 0.1):
                if key.fileobj is self.listener:
                    self._connect()
                elif key.fileobj == sys.stdin.fileno():
                    if not (order := sys.stdin.readline().split()):
                        return
                    self._obey(*order)
                    print("done", flush=True)
                elif events & selectors.EVENT_READ:
                    for way in [each for each in self.ways if each.source is key.fileobj]:
                        if way.reads and not way.read(self.delay):
                            self._close(way)
            for way in self.ways:
                way.write()

    def _want(self) -> None:
        for way in self.ways:
            back = next(each for each in self.ways if each.source is way.sink)
            wanted = (selectors.EVENT_READ if way.reads else 0) | (
                selectors.EVENT_WRITE if back.held and back.held[0][0] <= time.monotonic() else 0
            )
            known = way.source in self.selector.get_map()
            if wanted and known:
                self.selector.modify(way.source, wanted)
            elif wanted:
                self.selector.register(way.source, wanted)
            elif known:
                self.selector.unregister(way.source)

    def _connect(self) -> None:
        ours, _ = self.listener.accept()
        try:
            theirs = socket.create_connection(self.to)
        except OSError:
            ours.close()
            return
        for sock in (ours, theirs):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ways += [Way("up", ours, theirs), Way("down", theirs, ours)]
        for way in self.ways[-2:]:
            way.left = 0 if self.cuts & {way.name, "both"} else None

    def _close(self, ended: Way) -> None:
        for way in [each for each in self.ways if each.source in (ended.source, ended.sink)]:
            with contextlib.suppress(OSError):
                way.sink.setblocking(True)
                for _, data in way.held:
                    way.sink.sendall(data)
        for way in [each for each in self.ways if each.source in (ended.source, ended.sink)]:
            if way.source in self.selector.get_map():
                self.selector.unregister(way.source)
            way.source.close()
            self.ways.remove(way)

    def _obey(self, what: str, *words: str) -> None:
        if what == "delay":
            self.delay = float(words[0])
        elif what == "cut":
            self.cuts.add(words[0])
        elif what == "heal":
            self.cuts.clear()
        for way in self.ways:
            if what == "heal":
                way.left = None
            elif what in ("cut", "mute") and words[0] in (way.name, "both"):
                way.left = 0 if what == "cut" else int(words[1])
            elif what == "replay" and words[0] == way.name:
                way.hold(way.last)


Relay(*sys.argv[1:]).run()
