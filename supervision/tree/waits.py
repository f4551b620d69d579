"""Waits for an event that a signal interrupts, also one that comes as the wait begins.

CPython runs a signal handler between two bytecodes of the main thread. A signal that comes after
the last of them, or on another thread, does not end a wait that the main thread is in. So no wait
of that thread is longer than `SIGNAL_PERIOD`, after which the handler runs.
"""

from __future__ import annotations

import threading
import time
from typing import Final

SIGNAL_PERIOD: Final = 0.5  # seconds: the greatest delay of a signal


def wait_event(event: threading.Event, timeout: float | None = None) -> bool:
    """As ``event.wait(timeout)``; *timeout* in seconds, None for no limit."""
    limit = threading.TIMEOUT_MAX if timeout is None else min(timeout, threading.TIMEOUT_MAX)
    if threading.current_thread() is not threading.main_thread():
        return event.wait(limit)
    deadline = time.monotonic() + limit
    while not event.wait(min(SIGNAL_PERIOD, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            return event.is_set()
    return True
