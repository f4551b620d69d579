"""`CallbackThread`: one thread runs user callbacks, so that I/O threads do not block.

- Callbacks run one after the other, in the order in which they were handed over.
- A callback that raises is reported and does not affect the others.
- The thread starts with the first callback; if that fails, with the next one.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from phalanx.supervision import WouldDeadlock

if TYPE_CHECKING:
    from collections.abc import Callable


class CallbackThread:
    """Runs callbacks on a thread of its own.

    Args:
        report: Called with an exception that a callback raised, or that prevented the thread.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._report = report
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None]
        self._queue = queue.SimpleQueue()
        # No lock around it all: callbacks are handed over under other locks, and where a finalizer
        # runs in the middle of that.
        self._unstarted = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ident: int | None = None
        self._closed = False

    def run(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run ``callback(*args)`` soon; after `close`, at once in the caller's thread."""
        if self._closed:
            self._call(callback, args)
            return
        self._queue.put((callback, args))
        if self._thread is None and self._unstarted.acquire(blocking=False):
            self._start()
        if self._closed:  # meanwhile: the thread may have ended, or have been unknown to `close`
            self._queue.put(None)
            self._run_left()

    def is_current(self) -> bool:
        """Whether the calling thread is the one that runs callbacks."""
        return threading.get_ident() == self._ident

    def check_may_wait(self, what: str) -> None:
        """Raise `WouldDeadlock` where *what* would wait on the thread of the callbacks."""
        if threading.get_ident() == self._ident:
            msg = f"{what}: a callback may not wait for its executor; use non_block=True"
            raise WouldDeadlock(msg)

    def close(self, timeout: float) -> None:
        """Run what is queued, then end the thread; waits at most *timeout* seconds."""
        self._closed = True
        thread = self._thread
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout)
        elif self._unstarted.acquire(blocking=False):  # there is none, and none to come
            self._run_left()

    def _start(self) -> None:
        thread = threading.Thread(target=self._loop, name="phalanx-callbacks", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._unstarted.release()
            self._report(error)
            return
        self._thread = thread

    def _run_left(self) -> None:
        while not self._queue.empty():
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is None:
                if self._thread is None:
                    continue  # for a thread that never was
                self._queue.put(None)  # the thread has not ended yet: it does the rest
                return
            self._call(*item)

    def _loop(self) -> None:
        self._ident = threading.get_ident()
        while (item := self._queue.get()) is not None:
            self._call(*item)
        self._ident = None  # the next thread may have it

    def _call(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            callback(*args)
        except BaseException as error:  # noqa: BLE001  # the callback's own fault, reported
            self._report(error)
