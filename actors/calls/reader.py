"""`Reader`: reads a group's sockets in one thread: a blocked caller, or else the event loop.

- While anything is unanswered, exactly one thread reads. A caller that finds a reader sleeps until
  its call is done or it becomes the reader. At rest no thread reads and nothing runs.
- A caller that waits alone reads in its own thread: its answer takes no thread switch.
- Answers that no caller waits for are read within a few milliseconds; if a callback, an await or a
  stream waits for them, at once.

All bookkeeping is under the plane's lock.

Source: the leader/followers pattern (Schmidt et al., POSA2).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from phalanx.actors.signals.interrupts import uninterrupted
from phalanx.runtime import Spinner, descriptors, usable_processors
from phalanx.supervision import SIGNAL_PERIOD, RuntimeFault, wait_periods

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import EventLoop, OwnedLock

    from .call import Call
    from .rank import RankTable

Events = list[tuple[int, int]]
Waitable: TypeAlias = "Call | Ticket"

_BATCH = 64  # events taken from the kernel at once
_TICK = 0.002  # seconds after which the event loop reads what no caller waits for
_LAST_READER = 5.0  # seconds for a reader that was woken to stop


class Poller:
    """The readiness of a group's channels, by epoll(7); an eventfd ends its wait.

    Attributes:
        fileno: Returns a descriptor that is readable while any event is pending.
        poll: Waits so many seconds, None for no limit, and returns at most so many events.
        woken: The event that `wake` causes.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as made:
            self._epoll = descriptors.own(select.epoll(), made)
            self._kick = descriptors.own(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), made)
            self.woken = (self._kick, select.EPOLLIN)
            self._epoll.register(*self.woken)
            made.pop_all()
        self.poll: Callable[[float | None, int], Events] = self._epoll.poll
        self.fileno = self._epoll.fileno

    def add(self, fd: int) -> None:
        """Poll *fd* for messages."""
        self._epoll.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Do not poll *fd*."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def want_to_write(self, fd: int, *, on: bool) -> None:
        """Also poll *fd* for room to write."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if on else 0))

    def wake(self) -> None:
        """Make `poll` return; takes no lock."""
        os.eventfd_write(self._kick, 1)

    def reset(self) -> None:
        """End the event of `wake`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._kick)

    def close(self) -> None:
        """Close the descriptors."""
        descriptors.close(self._epoll)
        descriptors.close(self._kick)


class Ticket:
    """An event that happens once: a free place in the queue, an idle group, an item.

    Args:
        wake: Called when it happens, on the thread that notices: for a task of asyncio.
    """

    done = False
    waiters: tuple[threading.Lock, ...] = ()

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self.wake = wake


SPIN = 50e-6
"""Seconds of adaptive spinning; some three times what waking a process takes."""


def spin_time(ranks: int) -> float:
    """Return for how many seconds readers poll before they block.

    To be woken takes longer than a small message if the processor has gone idle meanwhile. Polling
    costs the processor, so it happens only if there is one for each of so many *ranks* and one for
    the driver.
    """
    return SPIN if usable_processors() >= ranks + 1 else 0.0


class Reader:
    """The role of the reader.

    Args:
        lock: The plane's.
        table: How many answers are owed.
        on_ready: Called with a list of (descriptor, events), some of which may be unknown;
            without the lock, on the thread that reads.
        clock: The clock of *loop* and of deadlines.

    Attributes:
        watched: How many callbacks, awaits and streams want answers read at once.
        spin: Seconds for which a caller polls before it blocks.
        on_wake: Called after `wake`, as *on_ready* is.
    """

    def __init__(
        self,
        loop: EventLoop,
        lock: OwnedLock,
        table: RankTable,
        on_ready: Callable[[Events], None],
        *,
        poller: Poller | None,
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._lock = lock
        self._table = table
        self._on_ready = on_ready
        self._clock = clock
        self._poller = Poller() if poller is None else poller
        self._woken = self._poller.woken
        self.add = self._poller.add
        self.remove = self._poller.remove
        self.want_to_write = self._poller.want_to_write
        self._reader = 0  # the thread that reads; 0 for none
        self._reads_for: Waitable | None = None
        # The threads that wait while another reads, and the locks that are released to wake them.
        self._sleepers: dict[int, threading.Lock] = {}
        self._next: deque[threading.Lock] = deque()  # callers that could read
        self._passes_on = False  # the thread that leaves has yet to see to the next reader
        self._armed = False
        self._ticking = False
        self._reads = 0
        self.watched = 0
        self.spin = 0.0
        self.on_wake: Callable[[], None]
        self._spinner = Spinner()
        self._look_once = functools.partial(self._poller.poll, 0, _BATCH)
        self._closing: threading.Event | None = None
        with descriptors.closed_on_error(self._poller):
            self._watch = loop.watch(self._poller.fileno(), 0, self._on_loop)

    # --- waiting ------------------------------------------------------------------------

    def wait(self, what: Waitable, deadline: float | None) -> bool:
        """Return True once *what* is done, False at *deadline*; reads if no other thread does.

        Not for a thread that is waiting already (`is_mine`) and was interrupted.
        """
        if what.done:
            return True
        # One block around all of it: an exception may be thrown in at any step, and a reader that
        # does not read would leave every other caller waiting.
        try:
            while True:
                turn = self._enter(what)
                if turn is None:
                    self._read_until(what, deadline)
                else:
                    left = None if deadline is None else deadline - self._clock()
                    turn.acquire(timeout=next(wait_periods(left)))
                if what.done:
                    return True
                if deadline is not None and self._clock() >= deadline:
                    return False
        finally:
            try:
                self._exit(what)
            except BaseException:  # thrown in
                self._exit(what)
                raise

    def is_mine(self) -> bool:
        """Whether this thread waits here, and may read for others."""
        if not self._reader and not self._sleepers:
            return False
        me = threading.get_ident()
        return self._reader == me or me in self._sleepers

    def notify(self, what: Waitable) -> None:
        """Wake the threads that wait for *what*, which is done. Under the lock."""
        if what.waiters:
            for turn in what.waiters:
                if turn.locked():
                    with contextlib.suppress(ValueError):
                        self._next.remove(turn)
                    turn.release()
            what.waiters = ()
        if self._reads_for is what and self._reader != threading.get_ident():
            self._poller.wake()

    def fulfil(self, ticket: Ticket) -> None:
        """Note that what *ticket* stands for has happened. Under the lock."""
        ticket.done = True
        self.notify(ticket)
        if ticket.wake is not None:
            ticket.wake()

    def ensure(self) -> None:
        """Have the event loop read if something is unanswered and no thread reads. Under the lock.

        At once if the answers are watched, else if no other thread reads by the next tick: waking
        the loop for each answer costs more than the answer, and a caller that has sent calls in a
        row is likely to wait for them.
        """
        if self._reader or self._armed or not self._table.owed:
            return
        if self.watched:
            self._arm()
        elif not self._ticking:
            self._ticking = True
            self._tick_later()

    def wake(self) -> None:
        """Have the thread that reads, if any, call *on_wake*. Takes no lock."""
        if self._closing is None:
            self._poller.wake()

    def close(self) -> None:
        """Close the descriptors; everything that could be waited for is done."""
        self._watch.cancel()
        with self._lock.asked():
            self._closing = gone = threading.Event()
            if self._reader:
                self._poller.wake()
            else:
                gone.set()
        # A caller that is just leaving may still use the poller.
        gone.wait(_LAST_READER)
        self._poller.close()

    @uninterrupted
    def _enter(self, what: Waitable) -> threading.Lock | None:
        """Make this thread the reader and return None, or a lock that is released to wake it.

        A thread that has followed may have been woken to read: it reads, follows another reader, or
        leaves by `_exit`, and each is under the lock.
        """
        me = threading.get_ident()
        with self._lock.unasked:
            if me in self._sleepers:
                self._unfollow(me, what)
            if not self._reader or self._reader == me:
                self._reader = me
                self._reads_for = what
                if self._armed:
                    self._disarm()
                return None
            turn = threading.Lock()
            if not what.done:
                turn.acquire()
                self._sleepers[me] = turn
                what.waiters += (turn,)
                self._next.append(turn)
            return turn

    @uninterrupted
    def _exit(self, what: Waitable) -> None:
        me = threading.get_ident()
        with self._lock.unasked:
            # Noted before anything changes: an exception may be thrown in at any step.
            if self._reader == me:
                if self._next or self._table.owed or self._closing is not None:
                    self._passes_on = True
                self._reader = 0
                self._reads_for = None
            elif me in self._sleepers:
                if self._sleepers[me] not in self._next:  # it may have been woken to read
                    self._passes_on = True
                self._unfollow(me, what)
            if self._passes_on:
                self._pass_on()
                self._passes_on = False

    def _unfollow(self, me: int, what: Waitable) -> None:
        """Take a follower off the lists."""
        turn = self._sleepers[me]
        with contextlib.suppress(ValueError):
            at = what.waiters.index(turn)
            what.waiters = what.waiters[:at] + what.waiters[at + 1 :]
        with contextlib.suppress(ValueError):
            self._next.remove(turn)
        del self._sleepers[me]

    def _pass_on(self) -> None:
        """Make a waiting caller the reader, or else the event loop."""
        if self._reader:
            return
        if self._closing is not None:
            self._closing.set()
        elif self._next:
            self._next.popleft().release()
        else:
            self.ensure()

    # --- reading ------------------------------------------------------------------------

    def _read_until(self, what: Waitable, deadline: float | None) -> None:
        poll = self._poller.poll
        timeout = SIGNAL_PERIOD
        while not what.done and self._closing is None:
            if deadline is not None:
                timeout = min(deadline - self._clock(), SIGNAL_PERIOD)
                if timeout <= 0:
                    return
            found = None
            if self.spin:  # not while others wait: polling takes the interpreter lock they need
                moment = min(self.spin, timeout)
                found = self._spinner.look(self._look_once, moment, self._next.__len__)
            self._read(found or poll(timeout, _BATCH))

    def _read(self, events: Events) -> None:
        self._reads += 1
        self._on_ready(events)
        if self._woken in events:
            self._poller.reset()
            self.on_wake()

    # --- the event loop reads -------------------------------------------------------------

    def _on_loop(self, _events: int) -> None:
        with self._lock.asked():
            if self._reader or self._closing is not None:
                self._disarm()
                return
            self._reader = threading.get_ident()
        try:
            self._read(self._poller.poll(0, _BATCH))
        finally:
            with self._lock.asked():
                if self._next or not self._table.owed:
                    self._disarm()
                self._reader = 0
                self._pass_on()

    def _tick_later(self) -> None:
        reads = self._reads

        def tick() -> None:
            with self._lock.asked():
                # A thread that reads calls `ensure` when it leaves.
                is_seen_to = self._armed or self._reader or not self._table.owed
                if self._closing is not None or is_seen_to:
                    self._ticking = False
                elif self._reads != reads:
                    self._tick_later()
                else:
                    self._ticking = False
                    self._arm()

        try:
            self._loop.call_at(self._clock() + _TICK, tick)
        except RuntimeFault:  # the loop has ended: every call is about to be failed for that
            self._ticking = False

    def _arm(self) -> None:
        self._armed = True
        self._watch.modify(select.EPOLLIN)

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self._watch.modify(0)
