"""The node process: starts ranks on its machine by order of the driver, and keeps the node's lease.

- It makes one decision: when its lease is over, or its link or starter has ended, it ends at once.
  The kernel, its guardian and its zygotes then end all its descendants; the guardian reads
  the same lease, and ends this process a moment after it, for the case that it is stopped.
- Its main thread waits only for events and timers: beats are sent in time.
- Its starter hands it an order over an inherited socket, and is watched by pidfd.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import zmq

from phalanx.cluster.link.handshake import greeting_of
from phalanx.cluster.link.messages import (
    Answer,
    Beat,
    Fenced,
    Kill,
    Launch,
    Leave,
    Message,
    NodeKey,
    NodeOrder,
    NodeUnreached,
    Signal,
    Stacks,
    Swept,
    Taken,
    Warm,
    Withdraw,
    decode,
    encode,
)
from phalanx.cluster.link.node_link import LinkState, NodeLink
from phalanx.cluster.nodes.decide import BEATS_PER_LEASE
from phalanx.cluster.nodes.lease import Lease
from phalanx.runtime import EventLoop, Launcher, descriptor_limit, syscalls
from phalanx.supervision import NodeRefused

from .network_interface import interface_of, why_unreached
from .output import OutputWindow
from .ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

ORDER = 16 * 1024
"""Bytes of an order."""

ENDED = 70
"""Exit code of a node process that has ended itself, and left the rest to its guardian."""

REFUSED = 71
"""Exit code of one that the driver's side would not have."""

_IMPORT = 300.0  # seconds for a preload; a cold disk under load takes its time for torch
_GUARD = 0.3  # seconds from the end of the lease until the guardian ends this process
_REACH = 5.0  # seconds for a connection, after which the node reports that it has none
_AGAIN = 0.2  # seconds until a key is offered again that the gateway did not know
_LINK_LEASES = 2.5  # leases without a message on the first link; after a cut TCP takes up to two
_SPARSE = 4  # of so many beats one goes out on a link without answers: it delays the fence
_PATIENCE = 15  # beats, and four round trips, until a connection without answers is made anew


def main() -> None:
    """Run; the arguments are the starter's socket and its pidfd."""
    with contextlib.suppress(FileNotFoundError):
        sys.path.append(str(Path.cwd()))  # for ranks; last: it may have a zmq.py
    descriptor_limit.make_room(descriptor_limit.hard_limit())  # ranks get the limit that was there
    starter = socket.socket(fileno=int(sys.argv[1]))
    order = decode([starter.recv(ORDER)])
    assert isinstance(order, NodeOrder)
    node = NodeProcess(order, starter, int(sys.argv[2]))
    try:
        node.run()
    except NodeRefused as error:
        node.end(str(error), REFUSED)


class NodeProcess:
    """The node. See the module; `run` is its main thread."""

    def __init__(self, order: NodeOrder, starter: socket.socket, starter_pidfd: int) -> None:
        self._order = order
        self._starter = starter
        self._join_until = syscalls.boot_time() + order.join
        self._reach_until = syscalls.boot_time() + _REACH  # 0 once it was reported, or reached
        self._link = NodeLink(order.endpoint, order.gateway_key)
        self._link.connect()
        with contextlib.suppress(BrokenPipeError):  # if it has gone, that is noticed next
            starter.send(encode(NodeKey(number=order.number, key=self._link.public))[0])
        # For beats alone, while the first one is silent: it is there by then, and has no backlog.
        self._second = self._link.another()
        self._second_at = 0.0  # when it began to connect, or has brought an answer
        self._tried = 0  # beats that it was needed for
        self._last_received_at = 0.0  # on the first one, or when it was to be
        self._lease: Lease | None = None  # from the greeting on
        self._beat_at = 0.0
        self._retry_at = 0.0
        self._is_refused = False
        self._fenced = ""
        self._is_done = False
        self._reports: deque[Message] = deque()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = syscalls.create_boot_timer()
        self._launcher = Launcher(EventLoop(), preload=(), start_timeout=_IMPORT)
        self._launcher.keep_until(self._join_until + order.lease)
        self._window = OutputWindow(order.lease / BEATS_PER_LEASE)
        self._ranks = Ranks(
            self._launcher, self._report, lambda: interface_of(self._link.address), self._window
        )
        self._starters = (starter_pidfd, starter.fileno())
        self._steps: dict[int, Callable[[], None]] = {
            **dict.fromkeys(self._starters, self._be_left),
            self._wakeup: lambda: _drain(self._wakeup),
            self._timer: lambda: _drain(self._timer),
        }

    def run(self) -> None:
        """Serve until the driver lets the node go.

        Raises:
            NodeRefused: the driver's side would not have it.
        """
        while not self._is_done:
            self._arm()
            for fd in self._wait():
                if (step := self._steps.get(fd)) is not None:
                    step()
            self._link.look()
            now = syscalls.boot_time()
            while (message := self._link.receive()) is not None:
                self._obey(message, now)
                self._last_received_at = now
                if self._lease and not self._lease.is_quiet(now):
                    self._tried = 0
            was_open = self._second.state is LinkState.OPEN
            self._second.look()
            if self._lease and self._second.state is LinkState.OPEN and not was_open:
                # There may not be much left of the lease. And the gateway is to know this link.
                self._second.send(Beat(number=self._lease.beat(now)))
            while (message := self._second.receive()) is not None:
                self._obey(message, now)
                self._second_at = now
            if self._lease is None:
                self._join(now)
            elif self._lease.is_over(now):
                self.end("its lease is over")
            elif self._link.state is LinkState.ENDED and not self._is_done:
                self.end("its control link has ended")
            elif now > self._last_received_at + _LINK_LEASES * self._order.lease:
                self.end("its control link is silent")  # though another connection is not
            else:
                self._speak(now)
        self._link.close()
        if self._fenced:
            raise NodeRefused(self._fenced)

    def end(self, why: str, code: int = ENDED) -> NoReturn:
        """End at once: the workers die with this process, the guardian ends what they leave."""
        poller = select.poll()
        poller.register(2, select.POLLOUT)
        if poller.poll(0):  # no reader may keep this process from its end
            with contextlib.suppress(OSError):
                os.write(2, f"phalanx node {self._order.number} ends: {why}\n".encode())
        os._exit(code)

    def _be_left(self) -> None:
        """End, as what has started this process has ended or let it go."""
        if self._lease is None:
            self.end("its starter has gone")
        for each in self._starters:
            self._steps.pop(each, None)
        self._ranks.sweep()  # its last word fences the node: the driver need not wait for the lease
        self._beat_at = math.inf  # which ends, should something withstand that

    # --- waiting --------------------------------------------------------------------------

    def _arm(self) -> None:
        """Set the timer to when something is due."""
        if self._lease is not None:
            due = min(self._beat_at, self._lease.until)
        else:
            dues = (self._join_until, self._retry_at, self._reach_until)
            due = min(each for each in dues if each)
        syscalls.set_boot_timer(self._timer, due)

    def _wait(self) -> list[int]:
        """Return those of our descriptors that have news; ZeroMQ's are looked at in any case."""
        poller = zmq.Poller()
        for each in (*self._steps, *self._link.ends, *self._second.ends):
            poller.register(each, zmq.POLLIN)
        return [fd for fd, _ in poller.poll() if isinstance(fd, int)]

    def _report(self, message: Message) -> None:
        self._reports.append(message)
        os.eventfd_write(self._wakeup, 1)

    # --- the link -------------------------------------------------------------------------

    def _join(self, now: float) -> None:
        """Greet once the link is there; from then on the lease runs."""
        order = self._order
        if self._link.address or self._is_refused:
            self._reach_until = 0.0
        elif self._reach_until and now >= self._reach_until:
            self._reach_until = 0.0
            if why := why_unreached(order.endpoint):
                why = f"{socket.gethostname()} does not reach {order.endpoint}: {why}"
                with contextlib.suppress(BrokenPipeError):
                    self._starter.send(encode(NodeUnreached(number=order.number, why=why))[0])
        if self._link.state is LinkState.OPEN:
            greeting = greeting_of(order.place, self._link.address)
            now = syscalls.boot_time()
            self._link.send(greeting)
            self._lease = Lease(now, order.lease)
            self._last_received_at = now
            self._launcher.keep_until(self._lease.until + _GUARD)
            self._beat_at = now
            self._second.connect()
            self._second_at = now
        elif now >= self._join_until:
            why = "does not admit the key of this node" if self._is_refused else "was not reached"
            raise NodeRefused(
                f"the gateway at {order.endpoint} {why} within {order.join:g} s: start the node "
                "anew, with the order of the driver that runs now"
            )
        elif self._link.state is LinkState.REFUSED:
            self._is_refused = True
            self._link.renew()
            self._retry_at = now + _AGAIN
        elif self._retry_at and now >= self._retry_at:
            self._retry_at = 0.0
            self._link.connect()

    def _speak(self, now: float) -> None:
        """Send what there is to report, and a beat if one is due."""
        while self._reports:
            message = self._reports.popleft()
            self._link.send(message)
            self._is_done |= isinstance(message, Swept)
        assert self._lease is not None
        if now >= self._beat_at:
            self._beat_at = now + self._order.lease / BEATS_PER_LEASE
            beat, is_quiet = Beat(number=self._lease.beat(now)), self._lease.is_quiet(now)
            if not is_quiet or self._tried % _SPARSE == 0:
                self._link.send(beat)
            if is_quiet:
                self._try_second(beat, now)
            self._ranks.look()

    def _try_second(self, beat: Beat, now: float) -> None:
        """Send *beat* on the second link; have that connect anew if it is of no use.

        After a cut TCP may be silent for as long again as that has lasted: longer than the lease.
        """
        if self._second.state is LinkState.OPEN:
            self._second.send(beat)
            if not self._tried:
                self._second_at = now  # until now it had nothing to answer
        assert self._lease is not None
        patience = 2 * min(self._lease.round_trip, self._order.lease / 16)  # within the lease
        if self._second.state is not LinkState.ENDED and self._second.address:
            patience = 2 * patience + _PATIENCE * self._order.lease / BEATS_PER_LEASE
        if now >= self._second_at + patience:
            self._second.renew()
            self._second.connect()
            self._second_at = now
        self._tried += 1

    def _obey(self, message: Message, now: float) -> None:
        match message:
            case Answer(number=number) if self._lease is not None:
                if self._lease.answered(number, now):
                    self._launcher.keep_until(self._lease.until + _GUARD)
            case Launch():
                self._ranks.launch(message)
            case Warm(preload=preload, env=env):
                self._ranks.warm(preload, env)
            case Withdraw(number=number):
                self._ranks.withdraw(number)
            case Kill() | Signal():
                self._ranks.signal(message)
            case Stacks():
                self._ranks.describe(message)
            case Taken():
                self._window.taken(time.monotonic())
            case Leave():
                self._ranks.sweep()
            case Fenced(why=why):
                self._fenced = why
                self._ranks.sweep()
            case _:
                pass


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 8)


if __name__ == "__main__":
    main()
