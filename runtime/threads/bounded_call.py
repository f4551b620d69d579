"""A blocking call with a timeout, for functions that may never return.

The function runs on a daemon thread, which does not keep a program alive (`concurrent.futures`
joins its threads at exit).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

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
        self._thread: threading.Thread | None = None  # of the last call

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Return what *function* returns, or raise what it raises.

        Raises:
            Unanswered: it, or others before it, took longer than the limit. While an earlier call
                has not returned, each one is refused at once.
        """
        until = time.monotonic() + self._limit
        if not self._lock.acquire(timeout=self._limit):
            msg = f"other calls took {self._limit:g} s"
            raise Unanswered(msg)
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
                errors.append(error)

        try:
            if self._thread is not None and self._thread.is_alive():
                msg = "the call before is still without an answer"
                raise Unanswered(msg)
            self._thread = thread = threading.Thread(target=run, name=self._name, daemon=True)
            thread.start()
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                msg = f"no answer within {self._limit:g} s"
                raise Unanswered(msg)
        finally:
            self._lock.release()
        if errors:
            raise errors.pop()
        return results[0]
