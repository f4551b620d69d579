"""Services that one supervision tree shares: clock, timers, subscribers and log.

What the supervisors of one tree share: clock, timers, chance, and those who watch.

Guarantees: a subscriber that raises, SystemExit included, harms nobody but itself. Notices of one
supervisor arrive in order; they are also log events. They go to the logger that the tree was given,
else through what the latest executor in it logs by, else, those that say that something went wrong,
to structlog, which is imported with the first one; where that is not configured, to stderr.

Calls that are made later: what a supervisor needs of a clock, and one thread that provides it.

Guarantees: a callback runs once, not before its time, unless it was cancelled before; callbacks
must not block (a supervisor's only post a message). One that raises is reported by
`threading.excepthook`, and the later ones still run. The thread starts with `start` or the first
call and ends with `close`.

Left to others: a runtime that has an event loop of its own passes its own `Timers`.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from phalanx.supervision.core.notices import CallbackFailed, Notice, notice_fields
from phalanx.supervision.errors import error_text

from .monitors import stderr_logger

if TYPE_CHECKING:
    from phalanx.supervision.core.snapshot import SupervisorSnapshot

    from .actor import SupervisorActor


Cancel: TypeAlias = Callable[[], None]


class Timers(Protocol):
    """Calls back at a time of the monotonic clock."""

    def call_at(self, at: float, callback: Callable[[], None]) -> Cancel:
        """Call *callback* at *at*; return what cancels it, which may be called at any time."""
        ...


class ThreadTimers:
    """One daemon thread, asleep until the next call is due."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}
        self._numbers = count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Start the thread unless it runs; raises where the system has no thread to give."""
        with self._changed:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="phalanx-timers", daemon=True)
                thread.start()
                self._thread = thread  # only one that runs: the next call tries again

    def call_at(self, at: float, callback: Callable[[], None]) -> Cancel:
        """Call *callback* at *at*, on this thread."""
        with self._changed:
            if self._closed:
                return _nothing
            self.start()
            number = next(self._numbers)
            self._calls[number] = callback
            heapq.heappush(self._due, (at, number))
            if self._due[0][1] == number:
                self._changed.notify()

        def cancel() -> None:
            self._calls.pop(number, None)
            # Its entry in the heap stays until it is due, or until such entries are the majority:
            # a start limit of minutes, cancelled after milliseconds, must not pile up.
            if len(self._due) > 64 + 2 * len(self._calls):
                self._compact()

        return cancel

    def _compact(self) -> None:
        with self._changed:
            self._due = [entry for entry in self._due if entry[1] in self._calls]
            heapq.heapify(self._due)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._due:
                    self._changed.wait()
                    continue
                at, number = self._due[0]
                remaining = at - time.monotonic()
                if remaining > 0:
                    # The longest wait a lock takes is limited; a far time is waited for in parts.
                    self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self._due)
                callback = self._calls.pop(number, None)
            if callback is not None:
                try:
                    callback()
                except BaseException as error:  # noqa: BLE001 # all time limits depend on this thread
                    failed = (type(error), error, error.__traceback__, self._thread)
                    threading.excepthook(threading.ExceptHookArgs(failed))

    def close(self) -> None:
        """End the thread; what is not yet due is never called."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _nothing() -> None:
    pass


Subscriber: TypeAlias = Callable[[Notice], None]
Clock: TypeAlias = Callable[[], float]


class Tree:
    """The surroundings of a tree.

    Attributes:
        clock: The monotonic clock, in seconds.
        chance: Random numbers in [0, 1), for jitter.
        look: Returns the tree as it is now, from the top; None before its supervisor is made.
    """

    look: Callable[[], SupervisorSnapshot] | None = None

    def __init__(
        self,
        *,
        clock: Clock = time.monotonic,
        timers: Timers | None = None,
        chance: Callable[[], float] = random.random,
        log: Any = None,
    ) -> None:
        self.clock = clock
        self.chance = chance
        # How many instances each supervisor has numbered, by path: a restarted one goes on from
        # there. An entry goes with the child that its path names.
        self.instances: dict[str, int] = {}
        self._own_timers = ThreadTimers() if timers is None else None
        self._timers: Timers | None = timers
        self._log = log
        self._emit: Callable[[Notice], object] | None = None
        self._lock = threading.Lock()
        self._supervisors: set[SupervisorActor] = set()
        self._subscribers: dict[int, Subscriber] = {}
        self._numbers = count()

    def enter(self, supervisor: SupervisorActor) -> None:
        """Count *supervisor*, which is about to run; with the first one the timers start."""
        with self._lock:
            if self._own_timers is not None:
                self._own_timers.start()
            self._supervisors.add(supervisor)

    def leave(self, supervisor: SupervisorActor) -> None:
        """Discount *supervisor*; with the last one the timers end.

        Not with the top one: when that is killed, those below still stop their children, and
        kill by a timer what does not stop.
        """
        with self._lock:
            self._supervisors.discard(supervisor)
            is_last = not self._supervisors
        if is_last and self._own_timers is not None:
            self._own_timers.close()

    def is_inside(self, path: str) -> bool:
        """Return whether the supervisor at *path*, or one below it that it waits for, runs here."""
        me = threading.current_thread()
        with self._lock:
            mine = [each for each in self._supervisors if each.thread is me]
        return any(
            each.machine.path == path
            or (each.machine.path.startswith(f"{path}/") and not each.is_over)
            for each in mine
        )

    def forget_instances(self, path: str, children: Collection[str]) -> None:
        """Drop the numbers below *path* of children that are not among *children*."""
        for known in list(self.instances):
            above, _, below = known.partition(f"{path}/")
            if not above and below.partition("/")[0] not in children:
                self.instances.pop(known, None)

    def call_at(self, at: float, callback: Callable[[], object]) -> Cancel:
        """Call *callback* at *at*; return what cancels it."""
        timers = self._timers or self._own_timers
        assert timers is not None, "there are own timers where none were given"
        return timers.call_at(at, lambda: _ignored(callback()))

    def subscribe(self, subscriber: Subscriber) -> Cancel:
        """Call *subscriber* with every notice from now on, on the thread where it arises."""
        with self._lock:
            number = next(self._numbers)
            self._subscribers[number] = subscriber

        def cancel() -> None:
            with self._lock:
                self._subscribers.pop(number, None)

        return cancel

    def emit_by(self, emit: Callable[[Notice], object]) -> None:
        """Have *emit* log what is announced from now on, unless the tree has a logger."""
        self._emit = emit

    def announce(self, notice: Notice) -> None:
        """Log *notice* and pass it to the subscribers."""
        with suppress(BaseException):  # a logger that raises leaves nowhere to say so
            self._logged(notice)
        with self._lock:
            subscribers = list(self._subscribers.values())
        for subscriber in subscribers:
            try:
                subscriber(notice)
            except BaseException:  # noqa: BLE001 # whose callback it is must not cost a tree its supervisor
                with suppress(BaseException):
                    self._logger().exception("phalanx.subscriber_failed", notice=notice.event)

    def watcher_failed(self, path: str, error: BaseException) -> None:
        """Announce that a monitor of *path* raised."""
        self.announce(CallbackFailed(path, "monitor", error_text(error), self.clock()))

    def _logged(self, notice: Notice) -> None:
        if self._log is None and self._emit is not None:
            self._emit(notice)
        elif self._log is not None or notice.level != "debug":
            getattr(self._logger(), notice.level)(notice.event, **notice_fields(notice))

    def _logger(self) -> Any:
        return stderr_logger() if self._log is None else self._log


def _ignored(_: object) -> None:
    pass
