"""The guardian: a small process that ends what a dead driver left behind.

Guarantees: when the driver has died, however it died, every process of its tree is killed; then it
ends. It watches the driver by pidfd: a forked child
of the user's that still holds the other end of the socket does not deceive it. It heeds no signal
that can be ignored.

Left to others: `guardian`, which starts it, tells it and, at a clean close, kills it.

Imports nothing but the standard library: there is one for each driver, all the time.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import sys
import time

from . import descriptor_limit, process_title, process_tree

_ROUND = 10.0


def main() -> None:
    """Run; the arguments are the socket, the driver's pidfd and the tree's needle."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    descriptor_limit.raise_limit()  # a hunt holds one for each process
    sock = socket.socket(fileno=int(sys.argv[1]))
    driver, needle = int(sys.argv[2]), sys.argv[3].encode()
    process_title.show_title("phalanx: guardian")
    sessions = {(pid, ticks) for pid, ticks in json.load(sys.stdin)}
    _watch(sock, driver, sessions)
    # Twice the work of one round is never needed, except where something sits in a system call
    # that cannot be interrupted: then it is waited for as long as it takes.
    while process_tree.kill(
        process_tree.Quarry(needle, sessions=sessions), time.monotonic() + _ROUND
    ).left:
        pass


def _watch(sock: socket.socket, driver: int, sessions: set[tuple[int, int]]) -> None:
    """Listen until the driver is gone; change *sessions* as it says."""
    poller = select.poll()
    poller.register(driver, select.POLLIN)
    poller.register(sock, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if sock.fileno() in ready:
            # What the driver said before it died counts, so this comes first.
            with contextlib.suppress(ConnectionResetError):
                if packet := sock.recv(1 << 16):
                    _heed(json.loads(packet), sessions)
                    continue
            return
        if driver in ready:
            return


def _heed(message: dict[str, object], sessions: set[tuple[int, int]]) -> None:
    match message:
        case {"add_session": [int(pid), int(ticks)]}:
            sessions.add((pid, ticks))
        case {"drop_session": [int(pid), int(ticks)]}:
            sessions.discard((pid, ticks))
        case _:
            pass
