"""The guardian process: kills the driver's process tree when the driver has died.

- A memfd that the driver updates has the sessions of its processes and the time at which its lease
  ends. When the lease ends the driver is killed too, because it may be stopped.
- It watches the driver by pidfd: a forked child of the user's that still holds the other end of the
  socket has no effect.
- It ignores every signal that can be ignored; a clean close of the driver kills it.
- It imports the standard library only: one runs beside each driver.
"""

from __future__ import annotations

import contextlib
import math
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

LEASE = struct.Struct("@d8x")
"""First in the file: the end of the lease, in seconds of ``syscalls.boot_time``, or infinity."""

SESSION = struct.Struct("@qq")
"""A record after it: pid and start of a session's leader; zeros if the place is free."""


def main() -> None:
    """Run; the arguments are the socket, the driver's pidfd and the tree's tag."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    descriptor_limit.raise_limit()  # a kill holds one for each process
    sock = socket.socket(fileno=int(sys.argv[1]))
    driver, tag = int(sys.argv[2]), sys.argv[3].encode()
    process_title.show_title("phalanx: guardian")
    sessions = _sessions_in(_watch(sock, driver))
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


def _watch(sock: socket.socket, driver: int) -> int:
    """Return the driver's file once the driver is gone, or its lease over; -1 if it sent none."""
    file = -1
    timer = syscalls.create_boot_timer()
    poller = select.poll()
    for fd in (driver, timer, sock):
        poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if sock.fileno() in ready:
            # Before the pidfd: what the driver sent before it died counts.
            packet, fds = receive_with_fds(sock, 64, 1)
            if not packet:
                return file
            file = fds[0] if fds else file
        until: float = math.inf
        if file >= 0:
            (until,) = LEASE.unpack(os.pread(file, LEASE.size, 0))
        if syscalls.boot_time() >= until:
            process_tree.send_signal(driver, signal.SIGKILL)
        elif driver not in ready:
            if until < math.inf:
                syscalls.set_boot_timer(timer, until)
            continue
        return file


def _sessions_in(file: int) -> set[tuple[int, int]]:
    if file < 0:
        return set()
    records = os.pread(file, os.fstat(file).st_size - LEASE.size, LEASE.size)
    return {(pid, ticks) for pid, ticks in SESSION.iter_unpack(records) if pid}
