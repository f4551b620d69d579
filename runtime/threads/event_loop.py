"""Event loop on one thread: epoll, timers and callbacks posted by other threads.

- Callbacks run on the event loop's thread, one at a time. They must not block, and may be spurious
  (a number was closed and opened again within one round): read without blocking.
- A callback that raises is reported; the loop continues.
- `Watch` and `Timer` may be cancelled on any thread and in callbacks. On the loop's thread nothing
  is called after a cancel; elsewhere a call in progress may end. Cancel a watch before its
  descriptor is closed.
- In a forked child there is no event loop: every method raises or does nothing.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, TypeVar

from phalanx.runtime.event import Event, LoggedEvent
from phalanx.runtime.linux import descriptors
from phalanx.supervision import RuntimeFault

from .reentrant_lock import ReentrantLock, occupied

if TYPE_CHECKING:
    from collections.abc import Callable


class CallbackFailed(Event, event="callback_failed", level="error"):
    """A callback of the event loop raised."""

    callback: str
    trace: str


Result = TypeVar("Result")


def resolve(result: Future[Result], function: Callable[[], Result]) -> None:
    """Give *result* what *function* returns, or what it raises."""
    try:
        result.set_result(function())
    except BaseException as error:  # noqa: BLE001  # raised in the thread that waits for it
        result.set_exception(error)
        del result  # this frame is in the traceback: no cycle keeps what the callers have


_CLOSED_BY_OTHERS = "something in this process has closed a descriptor of its event loop"
_LARGEST_WAIT = 3600.0  # seconds; epoll's own limit is some 24 days in milliseconds


@dataclass(slots=True, eq=False, repr=False)
class Watch:
    """One descriptor under watch."""

    _loop: EventLoop
    _fd: int
    callback: Callable[[int], None]

    def modify(self, events: int) -> None:
        """Watch for *events* from now on; 0 pauses the watch. Does nothing after a cancel."""
        self._loop.change(self, self._fd, events)

    def cancel(self) -> None:
        """Stop watching. Idempotent."""
        self._loop.change(self, self._fd, None)


@dataclass(slots=True, eq=False, repr=False)
class Timer:
    """A callback at a time."""

    _loop: EventLoop
    at: float
    _callback: Callable[[], None] | None

    @property
    def is_pending(self) -> bool:
        """Whether it has neither been called nor cancelled."""
        return self._callback is not None

    def cancel(self) -> None:
        """Do not call it. Idempotent."""
        if self._callback is not None:
            self._callback = None
            self._loop.note_cancelled_timer()

    def __call__(self) -> None:
        """Call it now, unless it was cancelled; the loop does."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class EventLoop:
    """The thread and its one epoll.

    Args:
        emit: Called with `CallbackFailed`; None prints the traceback.

    Attributes:
        is_inside: Returns whether the caller has interrupted one of these methods on its thread.
    """

    def __init__(self, *, emit: Callable[[LoggedEvent], None] | None = None) -> None:
        self._pid = os.getpid()
        self._emit = emit
        # Reentrant: a finalizer or a signal handler may call the loop inside of one of these
        # methods. Each is written so that what it leaves half done is not read by another.
        self._lock = ReentrantLock()
        self.is_inside = self._lock.is_mine
        self._watches: dict[int, Watch] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._cancelled = 0
        self._order = itertools.count()
        self._posted: deque[Callable[[], None]] = deque()
        self._when_lost: dict[int, Callable[[str], None]] = {}
        self._closing = False
        self._why = "the loop is closed"
        self._closed = False
        self._ident = 0
        made = contextlib.ExitStack()
        try:
            self._epoll = descriptors.own(select.epoll(), made)
            self._wakeup = descriptors.own(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), made)
            self._epoll.register(self._wakeup, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="phalanx-loop", daemon=True)
            self._thread.start()
        except Exception:  # after a KeyboardInterrupt the thread may run
            made.close()
            raise

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> Watch:
        """Call *callback* with the epoll events whenever *fd* has any of *events*.

        Raises:
            FileExistsError: the descriptor is under watch already.
        """
        watch = Watch(self, fd, callback)
        self._check_process()
        with self._lock:
            self._check()
            try:
                self._epoll.register(fd, events)
            except OSError as error:
                if self._is_whole():
                    raise
                raise RuntimeFault(_CLOSED_BY_OTHERS) from error
            self._watches[fd] = watch
        return watch

    time = staticmethod(time.monotonic)
    """The clock of `call_at`, in seconds."""

    def call_at(self, at: float, callback: Callable[[], None]) -> Timer:
        """Call *callback* once, at *at* on the monotonic clock or soon after."""
        timer = Timer(self, at, callback)
        self._check_process()
        with self._lock:
            self._check()
            heapq.heappush(self._timers, (at, next(self._order), timer))
            # On the loop's own thread too: a finalizer may run there just before the wait begins.
            if self._timers[0][2] is timer:
                self._wake()
        return timer

    def post(self, callback: Callable[[], None]) -> None:
        """Call *callback* on the event loop's thread, after what was posted before it."""
        self._check_process()
        with self._lock:
            self._check()
            self._posted.append(callback)
            self._wake()  # under the lock: the descriptor is closed under it

    def call(self, function: Callable[[], Result]) -> Result:
        """Return what *function* returns, or raise what it raises, on the event loop's thread.

        Not from a callback.
        """
        result: Future[Result] = Future()
        self.post(partial(resolve, result, function))  # called in any case, before the thread ends
        return result.result()

    def when_lost(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call *callback* with the cause if the thread ends by an error; return what undoes this.

        From then on nothing that was watched, posted or timed is called: a thread that waits for
        it without a limit must be woken.
        """
        self._check_process()
        with self._lock:
            self._check()
            number = next(self._order)
            self._when_lost[number] = callback

        def forget() -> None:
            self._when_lost.pop(number, None)

        return forget

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, by `close` or by an error: it watches nothing."""
        return self._closed

    def is_current(self) -> bool:
        """Whether the caller is on the event loop's thread."""
        return get_ident() == self._ident

    def close(self) -> None:
        """End the thread after what has been posted; then close what the loop holds.

        In a callback it returns before that. Timers that are not due are dropped.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closing = True
            self._wake()
        if not self.is_current():
            self._thread.join()

    def change(self, watch: Watch, fd: int, events: int | None) -> None:
        """See `Watch`; None for *events* ends the watch."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed or self._watches.get(fd) is not watch:
                return
            if events is None:
                del self._watches[fd]
                # The owner may have closed it too early, which unregisters it.
                with contextlib.suppress(OSError):
                    self._epoll.unregister(fd)
                return
            try:
                self._epoll.modify(fd, events)
            except OSError:
                if self._is_whole():
                    raise
                # The woken thread raises the error and ends; that fails every waiter.
                with contextlib.suppress(RuntimeFault):
                    self._wake()

    def note_cancelled_timer(self) -> None:
        """See `Timer.cancel`."""
        if self._pid != os.getpid():
            return
        # A timer for each call, cancelled by its reply, would otherwise pile up until it is due.
        with self._lock:
            self._cancelled += 1
            if self._cancelled > 64 and self._cancelled * 2 > len(self._timers):
                self._cancelled = 0
                timers, self._timers = self._timers, []  # what comes meanwhile is not lost
                self._timers.extend([entry for entry in timers if entry[2].is_pending])
                heapq.heapify(self._timers)

    def _run(self) -> None:
        with occupied:
            self._ident = get_ident()
            cause = ""
            try:
                while not self._closing:
                    self._serve_once()
            except BaseException as error:  # noqa: BLE001  # such as EBADF: something has closed our descriptors
                cause = f"the event loop of this process has ended: {type(error).__name__}: {error}"
                self._why = cause  # of every refusal from here on
                with self._lock:  # what was accepted is in `_posted`
                    self._closing = True
                self._report_error("the loop itself, which is closed by this")
            self._run_posted()
            with self._lock:
                self._closed = True
                lost = tuple(self._when_lost.values()) if cause else ()
                self._when_lost.clear()
                self._watches.clear()
                self._timers.clear()
                for descriptor in (self._epoll, self._wakeup):
                    with contextlib.suppress(OSError):
                        descriptors.close(descriptor)
            for callback in lost:
                self._guard(partial(callback, cause))
            self._ident = 0  # the next thread may have it

    def _serve_once(self) -> None:
        with self._lock:
            due = self._timers[0][0] if self._timers else None
        # A post that came before this line has written to the eventfd: the wait ends at once.
        wait = -1.0 if due is None else min(max(0.0, due - time.monotonic()), _LARGEST_WAIT)
        for fd, events in self._epoll.poll(wait):
            if fd == self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup)
            elif (watch := self._watches.get(fd)) is not None:
                self._guard(watch.callback, events)
        watch = None  # callbacks that follow free what it belongs to
        self._run_posted()
        self._run_timers()

    def _run_posted(self) -> None:
        # Only as many as there are now: a callback that posts itself must not starve the rest.
        for _ in range(len(self._posted)):
            self._guard(self._posted.popleft())

    def _run_timers(self) -> None:
        now = time.monotonic()
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                timer = heapq.heappop(self._timers)[2]
                if not timer.is_pending:
                    self._cancelled -= 1
                    continue
            self._guard(timer)

    def _guard(self, callback: Callable[..., None], *args: int) -> None:
        try:
            callback(*args)
        except BaseException:  # noqa: BLE001  # a SystemExit here would end the loop
            self._report_error(callback)

    def _report_error(self, what: object) -> None:
        """Log the exception that *what* has raised."""
        trace = traceback.format_exc()
        with contextlib.suppress(Exception):  # a stderr that is closed
            try:
                if self._emit is not None:
                    at = time.monotonic()
                    self._emit(CallbackFailed(callback=repr(what), trace=trace, at=at))
                    return
            except BaseException:  # noqa: BLE001, S110  # such as the text of a user's object
                pass
            sys.stderr.write(trace)

    def _wake(self) -> None:
        try:
            os.eventfd_write(self._wakeup, 1)
        except OSError as error:
            raise RuntimeFault(_CLOSED_BY_OTHERS) from error

    def _is_whole(self) -> bool:
        """Whether our own descriptors are still what they were."""
        try:
            self._epoll.modify(self._wakeup, select.EPOLLIN)
        except OSError:
            return False
        return True

    def _check_process(self) -> None:
        # Before the lock, always: its holder may be a thread that the fork did not copy.
        if self._pid != os.getpid():
            raise RuntimeFault(
                "this loop belongs to the parent process; make another one after the fork"
            )

    def _check(self) -> None:
        if self._closing:
            raise RuntimeFault(self._why)
