"""Who reads a group's sockets: a blocked caller, else the hub's thread, never both.

Guarantees: while anything is unanswered somebody reads; a caller that finds a reader sleeps until
it is either served or made the reader; at rest nobody reads and nothing runs. A caller that waits
alone reads in its own thread: its answer takes no hop. What nobody waits for and nobody watches is
read within a few milliseconds; what somebody watches, at once.

Left to others: what is read, and when something is done (`plane`). All bookkeeping is under the
plane's lock, which is handed in.

Source: the leader/followers pattern (Schmidt et al., POSA2).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from phalanx.actors.signals.interrupts import uninterrupted
from phalanx.runtime import Spinner, descriptors
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Hub, OwnedLock

Events = list[tuple[int, int]]

_BATCH = 64  # events taken from the kernel at once
_LONGEST_POLL = 86400.0  # seconds; the kernel counts milliseconds in an int
_TICK = 0.002  # seconds after which the hub reads what nobody watches
_LAST_READER = 5.0  # seconds for a reader that was woken to let go


class Waitable(Protocol):
    """What a caller can wait for: set *done* under the lock, then call `Reading.wake`."""

    done: bool
    waiters: tuple[threading.Lock, ...]


class Ticket:
    """A place in a queue that becomes free."""

    done = False
    waiters: tuple[threading.Lock, ...] = ()


class Reading:
    """The role of the reader, and the epoll it reads.

    Args:
        lock: The plane's.
        is_due: Whether anything is unanswered; asked under the lock.

    Attributes:
        watched: How much there is that somebody wants to hear of at once, without waiting for it.
        spin: Seconds for which a caller looks for answers before it sleeps.
    """

    def __init__(self, hub: Hub, lock: OwnedLock, is_due: Callable[[], bool]) -> None:
        self._hub = hub
        self._lock = lock
        self._is_due = is_due
        self._epoll = select.epoll()
        descriptors.own(self._epoll)
        self._kick = descriptors.own(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._kicked = (self._kick, select.EPOLLIN)
        self._epoll.register(*self._kicked)
        self._reader = 0  # the thread that reads; 0 for nobody
        self._reads_for: Waitable | None = None
        self._sleepers: set[int] = set()  # the threads that wait while another reads
        self._next: deque[threading.Lock] = deque()  # callers that could read
        self._armed = False
        self._ticking = False
        self._read = 0  # how often somebody has read
        self.watched = 0
        self.spin = 0.0
        self._spinner = Spinner()
        self._looking = functools.partial(self._epoll.poll, 0, _BATCH)
        self._closing: threading.Event | None = None
        self._watch = hub.watch(self._epoll.fileno(), 0, self._on_hub)

    def start(self, on_ready: Callable[[Events], None], on_nudge: Callable[[], None]) -> None:
        """Learn whom to tell, before anything is read.

        Args:
            on_ready: Acts on a list of (descriptor, events), in which some may be nobody's; runs
                without the lock, on the reader's thread.
            on_nudge: Called after `nudge`, in the same way.
        """
        self._on_ready = on_ready
        self._on_nudge = on_nudge

    # --- descriptors (under the lock) -----------------------------------------------------

    def add(self, fd: int) -> None:
        """Read *fd* from now on."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Read *fd* no longer."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def want_to_write(self, fd: int, *, on: bool) -> None:
        """Have it told when *fd* takes packets again."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if on else 0))

    # --- waiting ------------------------------------------------------------------------

    def wait(self, what: Waitable, deadline: float | None) -> bool:
        """Return True once *what* is done, False at *deadline*; reads if nobody else does.

        Not for who is waiting already (`is_mine`), on a thread that was interrupted.
        """
        while not what.done:
            turn: threading.Lock | None = None
            leaves = True
            # One block around all of it: whatever strikes, a role that nobody plays would leave
            # every other caller waiting.
            try:
                turn = self._enter(what)
                if turn is None:
                    self._read_until(what, deadline)
                else:
                    limit = -1 if deadline is None else max(0.0, deadline - time.monotonic())
                    turn.acquire(timeout=min(limit, threading.TIMEOUT_MAX))
                leaves = what.done or (deadline is not None and time.monotonic() >= deadline)
            finally:
                try:
                    self._exit(turn, what, leaves=leaves)
                except BaseException:  # thrown in from outside: not even that may keep the role
                    self._exit(turn, what, leaves=leaves)
                    raise
            if deadline is not None and not what.done and time.monotonic() >= deadline:
                return False
        return True

    def is_mine(self) -> bool:
        """Whether this thread is in the middle of waiting: for others too, perhaps."""
        if not self._reader and not self._sleepers:
            return False
        me = threading.get_ident()
        return self._reader == me or me in self._sleepers

    @uninterrupted
    def _enter(self, what: Waitable) -> threading.Lock | None:
        """Make this thread the reader and return None, or a lock that others release for it."""
        with self._lock.unasked:
            if not self._reader:
                self._reader = threading.get_ident()
                self._reads_for = what
                self._disarm()
                return None
            turn = threading.Lock()
            if not what.done:
                turn.acquire()
                what.waiters += (turn,)
                self._next.append(turn)
                self._sleepers.add(threading.get_ident())
            return turn

    @uninterrupted
    def _exit(self, turn: threading.Lock | None, what: Waitable, *, leaves: bool) -> None:
        with self._lock.unasked:
            if turn is not None:
                self._unfollow(turn, what, leaves=leaves)
            elif self._reader == threading.get_ident():
                self._step_down()

    def wake(self, what: Waitable) -> None:
        """Wake who waits for *what*, which is done. Under the lock."""
        if what.waiters:
            for turn in what.waiters:
                if turn.locked():
                    with contextlib.suppress(ValueError):
                        self._next.remove(turn)
                    turn.release()
            what.waiters = ()
        if self._reads_for is what and self._reader != threading.get_ident():
            os.eventfd_write(self._kick, 1)

    def see_to_it(self) -> None:
        """Have the hub read, if something is unanswered and nobody reads. Under the lock.

        At once, or, where nobody would hear of it, when nobody else has by then: to wake the hub
        for each answer costs more than the answer, and a caller that has sent a row of calls is
        likely to come for them.
        """
        if self._reader or self._armed or not self._is_due():
            return
        if self.watched:
            self._arm()
        elif not self._ticking:
            self._ticking = True
            self._tick_later()

    def nudge(self) -> None:
        """Have whoever reads, if anybody does, call *on_nudge*. Takes no lock."""
        if self._closing is None:
            os.eventfd_write(self._kick, 1)

    def close(self) -> None:
        """Give the descriptors back; everything that could be waited for is done."""
        self._watch.cancel()
        with self._lock.asked():
            self._closing = gone = threading.Event()
            if self._reader:
                os.eventfd_write(self._kick, 1)
            else:
                gone.set()
        # A caller that is just leaving may still look at the epoll.
        gone.wait(_LAST_READER)
        descriptors.close(self._epoll)
        descriptors.close(self._kick)

    # --- reading ------------------------------------------------------------------------

    def _read_until(self, what: Waitable, deadline: float | None) -> None:
        poll = self._epoll.poll
        timeout = None
        while not what.done and self._closing is None:
            if deadline is not None:
                timeout = min(deadline - time.monotonic(), _LONGEST_POLL)
                if timeout <= 0:
                    return
            found = self._look(timeout) if self.spin else None
            self._take(found or poll(timeout, _BATCH))

    def _look(self, longest: float | None) -> Events | None:
        """Return what comes within a moment, without sleeping; nothing where others wait as well.

        They need the interpreter, for which this here asks again and again.
        """
        moment = self.spin if longest is None else min(self.spin, longest)
        return self._spinner.look(self._looking, moment, self._is_wanted)

    def _is_wanted(self) -> bool:
        return bool(self._next)

    def _take(self, events: Events) -> None:
        self._read += 1
        self._on_ready(events)
        if self._kicked in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._kick)
            self._on_nudge()

    def _unfollow(self, turn: threading.Lock, what: Waitable, *, leaves: bool) -> None:
        """Take a follower off the lists, however its wait ended. Under the lock."""
        self._sleepers.discard(threading.get_ident())
        with contextlib.suppress(ValueError):
            at = what.waiters.index(turn)
            what.waiters = what.waiters[:at] + what.waiters[at + 1 :]
        try:
            self._next.remove(turn)
        except ValueError:
            # It was made the reader, perhaps, just as it was served or gave up: pass it on.
            if leaves:
                self._pass_on()

    def _on_hub(self, _events: int) -> None:
        with self._lock.asked():
            if self._reader or self._closing is not None:
                self._disarm()
                return
            self._reader = threading.get_ident()
        try:
            self._take(self._epoll.poll(0, _BATCH))
        finally:
            with self._lock.asked():
                if self._next or not self._is_due():
                    self._disarm()
                self._step_down()

    def _tick_later(self) -> None:
        read = self._read

        def tick() -> None:
            with self._lock.asked():
                # Who reads sees to it when he leaves.
                is_seen_to = self._armed or self._reader or not self._is_due()
                if self._closing is not None or is_seen_to:
                    self._ticking = False
                elif self._read != read:
                    self._tick_later()
                else:
                    self._ticking = False
                    self._arm()

        try:
            self._hub.call_at(time.monotonic() + _TICK, tick)
        except RuntimeFault:  # the hub has ended: every call is about to be failed for that
            self._ticking = False

    def _arm(self) -> None:
        self._armed = True
        self._watch.modify(select.EPOLLIN)

    def _step_down(self) -> None:
        self._reader = 0
        self._reads_for = None
        if self._closing is not None:
            self._closing.set()
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        """Make a waiting caller the reader, or else the hub. Under the lock."""
        if self._reader or self._closing is not None:
            return
        if self._next:
            self._next.popleft().release()
        else:
            self.see_to_it()

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self._watch.modify(0)
