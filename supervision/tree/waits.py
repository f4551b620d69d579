"""Waits that a signal interrupts, also one that comes as the wait begins.

CPython runs a signal handler between two bytecodes of the main thread. A signal that comes after
the last of them, or on another thread, does not end a wait that the main thread is in. So no wait
of that thread is longer than `SIGNAL_PERIOD`, after which the handler runs.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

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
