"""Services that the supervisors of one tree share: clock, timers, waits, subscribers and log.

- A callback of the timers runs once, not before its time, unless it was cancelled; it must not
  block. One that raises is reported by `threading.excepthook`, and the later ones still run.
- Notices of one supervisor arrive in order; a subscriber that raises, SystemExit included, affects
  nothing else.
- Notices are log events too: of the logger given to the tree, else of the latest executor in it;
  without either, warnings and worse go to structlog (to stderr if that is not configured).
- No wait of the main thread is longer than `SIGNAL_PERIOD`. CPython runs a signal handler between
  two of its bytecodes: a signal that comes after the last, or on another thread, ends no wait.
"""

from __future__ import annotations

import random
import sched
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from phalanx.supervision.core.notices import CallbackFailed, Notice, notice_fields
from phalanx.supervision.errors import error_text
from phalanx.supervision.validate import check_callable

from .mailbox import ProtectedActor, start_actor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx.supervision.core.snapshot import SupervisorSnapshot

    from .actor import SupervisorActor
    from .monitors import Cancel

Subscriber: TypeAlias = Callable[[Notice], None]
Clock: TypeAlias = Callable[[], float]

SIGNAL_PERIOD: Final = 0.5  # seconds: the greatest delay of a signal


def wait_periods(timeout: float | None = None) -> Iterator[float]:
    """Yield the seconds to wait at a time, once at least, until *timeout* seconds have passed.

    None is no limit. Off the main thread it is one wait.
    """
    limit = threading.TIMEOUT_MAX if timeout is None else min(timeout, threading.TIMEOUT_MAX)
    is_main = threading.current_thread() is threading.main_thread()
    period = SIGNAL_PERIOD if is_main else threading.TIMEOUT_MAX
    deadline = time.monotonic() + limit
    while True:
        yield min(period, max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            return


def wait_event(event: threading.Event, timeout: float | None = None) -> bool:
    """As ``event.wait(timeout)``."""
    return any(event.wait(seconds) for seconds in wait_periods(timeout))


class Timers(Protocol):
    """Calls back at a time of the monotonic clock."""

    def call_at(self, at: float, callback: Callable[[], object]) -> Cancel:
        """Call *callback* at *at*; return a function that cancels it, at any time."""
        ...


class ThreadTimers:
    """Timers of one daemon thread, which sleeps until the next call is due."""

    def __init__(self) -> None:
        self._calls = sched.scheduler(time.monotonic)
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread unless it runs; raises if the system has no thread left."""
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="phalanx-timers", daemon=True)
                thread.start()
                self._thread = thread  # not before it runs: the next call tries again

    def call_at(self, at: float, callback: Callable[[], object]) -> Cancel:
        """Call *callback* at *at*, on this thread."""
        self.start()
        call = self._calls.enterabs(at, 0, callback)
        self._changed.set()

        def cancel() -> None:
            with suppress(ValueError):  # it has been called
                self._calls.cancel(call)

        return cancel

    def _run(self) -> None:
        while True:
            self._changed.clear()
            if self._closed:
                return
            try:
                left = self._calls.run(blocking=False)
            except BaseException as error:  # noqa: BLE001 # all time limits depend on this thread
                failed = (type(error), error, error.__traceback__, self._thread)
                threading.excepthook(threading.ExceptHookArgs(failed))
            else:
                # A lock limits the length of a wait.
                self._changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """End the thread; calls that are not yet due are dropped."""
        self._closed = True
        self._changed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def spawn_thread(target: Callable[[], None], name: str) -> None:
    """Run *target* on a daemon thread."""
    threading.Thread(target=target, name=name, daemon=True).start()


class TreeServices:
    """The services of one tree.

    Attributes:
        clock: The monotonic clock, in seconds.
        timers: Calls back at a time of that clock.
        jitter: Returns the share of a back-off's spread that a wait gets, from 0 to below 1.
        spawn: Runs a function on a thread of the name given; like *begin*, which starts the thread
            of an actor, it raises if there is no thread left.
        instances: How many instances each supervisor has numbered, by path: a restarted supervisor
            continues the numbers. An entry goes with the child that its path names.
        look: Returns the tree as it is now, from the top; None before its supervisor exists.
    """

    look: Callable[[], SupervisorSnapshot] | None = None

    def __init__(
        self,
        *,
        clock: Clock = time.monotonic,
        timers: Timers | None = None,
        jitter: Callable[[], float] = random.random,
        spawn: Callable[[Callable[[], None], str], object] = spawn_thread,
        begin: Callable[[ProtectedActor], None] = start_actor,
        log: Any = None,
    ) -> None:
        self.clock, self.jitter, self.spawn, self._begin = clock, jitter, spawn, begin
        self.instances: dict[str, int] = {}
        self.timers = ThreadTimers() if timers is None else timers
        self._log = log
        self._emit: Callable[[Notice], object] | None = None
        self._lock = threading.RLock()  # a finalizer may interrupt its holder
        self._members: set[SupervisorActor] = set()
        self._subscribers: list[Subscriber] = []
        self._held: set[Callable[[], object]] = set()
        self._at_end = ExitStack()

    def run(self, member: SupervisorActor) -> None:
        """Start the thread of *member*; the timers start with the first."""
        with self._lock:
            if isinstance(self.timers, ThreadTimers):
                self.timers.start()
            self._members.add(member)
        try:
            self._begin(member)
        except BaseException:
            self.leave(member)
            raise

    def leave(self, member: SupervisorActor) -> None:
        """Remove *member*; the timers end with the last.

        Not with the top one: when that is killed, those below still stop their children, and a
        timer kills children that do not stop.
        """
        with self._lock:
            self._members.discard(member)
            is_last = not self._members
            at_end = self._at_end.pop_all() if is_last else None
        if is_last and isinstance(self.timers, ThreadTimers):
            self.timers.close()
        if at_end is not None:
            at_end.close()

    def hold(self, acquire: Callable[[], Any], release: Callable[[Any], object]) -> None:
        """Hold what *acquire* returns, once, until *release* when the last supervisor has ended.

        Both must not block for long, nor use this object.
        """
        with self._lock:
            if self._members and acquire not in self._held:
                self._at_end.callback(release, acquire())
                self._held.add(acquire)

    def is_inside(self, path: str) -> bool:
        """Return whether this thread is that of *path*, or of one below it that is not over."""
        me = threading.current_thread()
        with self._lock:
            mine = [each for each in self._members if each.thread is me]
        return any(
            each.machine.path == path
            or (each.machine.path.startswith(f"{path}/") and not each.is_over)
            for each in mine
        )

    def forget_instances(self, path: str, children: Collection[str]) -> None:
        """Drop the numbers below *path*, except those of *children*."""
        for known in list(self.instances):
            above, _, below = known.partition(f"{path}/")
            if not above and below.partition("/")[0] not in children:
                self.instances.pop(known, None)

    def subscribe(self, subscriber: Subscriber) -> Cancel:
        """Call *subscriber* with every notice from now on, on the thread of its supervisor."""
        check_callable("subscriber", subscriber)
        with self._lock:
            self._subscribers.append(subscriber)

        def cancel() -> None:
            with self._lock, suppress(ValueError):
                self._subscribers.remove(subscriber)

        return cancel

    def emit_by(self, emit: Callable[[Notice], object]) -> None:
        """Have *emit* log what is announced from now on, unless the tree has a logger."""
        self._emit = emit

    def announce(self, notice: Notice) -> None:
        """Log *notice* and pass it to the subscribers."""
        with suppress(BaseException):  # a logger that raises leaves nowhere to report it
            self._logged(notice)
        with self._lock:
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            try:
                subscriber(notice)
            except BaseException:  # noqa: BLE001 # user code must not end a supervisor
                with suppress(BaseException):
                    self._logger().exception("phalanx.subscriber_failed", notice=notice.event)

    def callback_failed(self, path: str, callback: str, error: BaseException) -> None:
        """Announce that a *callback* of *path* raised (`CallbackFailed`)."""
        self.announce(CallbackFailed(path, self.clock(), callback, error_text(error)))

    def _logged(self, notice: Notice) -> None:
        if self._log is None and self._emit is not None:
            self._emit(notice)
        elif self._log is not None or notice.level != "debug":
            getattr(self._logger(), notice.level)(notice.event, **notice_fields(notice))

    def _logger(self) -> Any:
        """Return the tree's logger, else the program's; structlog's, unconfigured, uses stdout."""
        if self._log is not None:
            return self._log
        import structlog  # noqa: PLC0415 # `import phalanx` stays quick

        if structlog.is_configured():
            return structlog.get_logger("phalanx")
        return structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
