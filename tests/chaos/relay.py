"""Passes TCP connections on until told to go silent: ``relay.py FROM_HOST PORT TO_HOST PORT``.

SIGUSR1 mutes every connection there is; none is closed, as by a cable that is cut. Later ones pass.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys


def main() -> None:
    host, port, to_host, to_port = sys.argv[1:]
    listener = socket.create_server((host, int(port)))
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    other: dict[socket.socket, socket.socket] = {}
    muted: list[socket.socket] = []  # kept, so that they stay open

    def mute(*_: object) -> None:
        for sock in other:
            selector.unregister(sock)
        muted.extend(other)
        other.clear()
        print("muted", flush=True)

    signal.signal(signal.SIGUSR1, mute)
    signal.set_wakeup_fd(-1)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select(0.05):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is listener:
                ours, _ = listener.accept()
                theirs = socket.create_connection((to_host, int(to_port)))
                for one, two in ((ours, theirs), (theirs, ours)):
                    other[one] = two
                    selector.register(one, selectors.EVENT_READ)
            elif sock in other:
                data = b""
                with contextlib.suppress(OSError):
                    data = sock.recv(1 << 16)
                with contextlib.suppress(OSError):
                    other[sock].sendall(data)
                if not data:
                    for end in (sock, other.pop(sock)):
                        other.pop(end, None)
                        selector.unregister(end)
                        end.close()


main()
