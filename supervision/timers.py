"""Calls that are made later: what a supervisor needs of a clock, and one thread that provides it.

Guarantees: a callback runs once, not before its time, unless it was cancelled before; callbacks
must not block (a supervisor's only post a message). One that raises is reported by
`threading.excepthook`, and the later ones still run. The thread starts with `start` or the first
call and ends with `close`.

Left to others: a runtime that has an event loop of its own passes its own `Timers`.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Protocol, TypeAlias

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
