"""A blocking call with a timeout, for functions that may never return.

The function runs on a daemon thread, which does not keep a program alive (`concurrent.futures`
joins its threads at exit).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


class Unanswered(Exception):
    """The call did not return in time."""


class BoundedCaller:
    """Makes calls one after the other. Thread-safe.

    Args:
        name: Of the threads.
        limit: Seconds that `call` may take.
    """

    def __init__(self, name: str, limit: float) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._last: Future[Any] | None = None

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Return what *function* returns, or raise what it raises.

        Raises:
            Unanswered: it, or others before it, took longer than the limit. While an earlier call
                has not returned, each one is refused at once.
        """
        until = time.monotonic() + self._limit
        if not self._lock.acquire(timeout=self._limit):
            raise Unanswered(f"other calls took {self._limit:g} s")
        result: Future[_Result] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
                result.set_exception(error)

        try:
            if self._last is not None and not self._last.done():
                raise Unanswered("the call before is still without an answer")
            threading.Thread(target=run, name=self._name, daemon=True).start()
            self._last = result
            wait([result], max(0.0, until - time.monotonic()))
        finally:
            self._lock.release()
        if not result.done():
            raise Unanswered(f"no answer within {self._limit:g} s")
        return result.result()
