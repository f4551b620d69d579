"""The guardian process: kills the driver's process tree when the driver has died.

- If the driver has a lease, the end of the lease is the end of the driver: it is killed as well,
  for it may be stopped.
- It watches the driver by pidfd: a forked child of the user's that still holds the other end of the
  socket makes no difference.
- It ignores every signal that can be ignored; a clean close of the driver kills it.
- It imports the standard library only: one runs beside each driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time

from . import descriptor_limit, process_title, process_tree, syscalls
from .descriptors import receive_with_fds

_ROUND = 10.0

LEASE = struct.Struct("@d")
"""What the file of a lease holds: when it ends, in seconds of ``syscalls.boot_time``."""


def main() -> None:
    """Run; the arguments are the socket, the driver's pidfd and the tree's tag."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    descriptor_limit.raise_limit()  # a kill holds one for each process
    sock = socket.socket(fileno=int(sys.argv[1]))
    driver, tag = int(sys.argv[2]), sys.argv[3].encode()
    process_title.show_title("phalanx: guardian")
    sessions: set[tuple[int, int]] = set()
    _watch(sock, driver, sessions)
    # A child does what follows first. Whichever of the two is killed, the other ends what that one
    # had stopped in order to kill it.
    with contextlib.suppress(OSError):  # the kernel would not fork
        child = os.fork()
        if child:
            _, status = os.waitpid(child, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                os.kill(child, signal.SIGKILL)
    # One round is enough, unless a process is in a system call that cannot be interrupted.
    target = process_tree.TreeTarget(tag, sessions=sessions)
    while process_tree.kill(target, time.monotonic() + _ROUND):
        pass


def _watch(sock: socket.socket, driver: int, sessions: set[tuple[int, int]]) -> None:
    """Apply the driver's messages to *sessions* until the driver is gone, or its lease over."""
    lease = -1
    timer = syscalls.create_boot_timer()
    poller = select.poll()
    for fd in (driver, timer, sock):
        poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if lease >= 0 and timer in ready:
            until = read_lease(lease)
            if syscalls.boot_time() >= until:
                process_tree.send_signal(driver, signal.SIGKILL)
                return
            syscalls.set_boot_timer(timer, until)
        if sock.fileno() in ready:
            # Before the pidfd: what the driver sent before it died counts.
            with contextlib.suppress(ConnectionResetError):
                packet, fds = receive_with_fds(sock, 1 << 16, 1)
                if packet:
                    given = _obey(json.loads(packet), fds, sessions)
                    if given >= 0:
                        if lease >= 0:
                            os.close(lease)
                        lease = given
                        syscalls.set_boot_timer(timer, read_lease(lease))
                    continue
            return
        if driver in ready:
            return


def _obey(message: dict[str, list[int]], fds: list[int], sessions: set[tuple[int, int]]) -> int:
    """Apply *message* to *sessions*; return the file of a lease if it came along, else -1."""
    if "lease" in message and fds:
        return fds[0]
    for fd in fds:
        with os.fdopen(fd) as known:
            known.seek(0)  # the driver has written it through the same open file
            sessions.update((pid, ticks) for pid, ticks in json.load(known))
    if "add_session" in message:
        pid, ticks = message["add_session"]
        sessions.add((pid, ticks))
    elif "drop_session" in message:
        pid, ticks = message["drop_session"]
        sessions.discard((pid, ticks))
    return -1


def read_lease(file: int) -> float:
    """Return when the lease in *file* ends, in seconds of ``syscalls.boot_time``."""
    (until,) = LEASE.unpack(os.pread(file, LEASE.size, 0))
    return float(until)
