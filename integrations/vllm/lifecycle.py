"""The threads that heal an engine when its workers have returned. Needs nothing of vLLM."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class EarlyHealing:
    """Threads that heal one engine as soon as its workers are back, rather than with a request.

    Args:
        heal: Brings the workers to the state of those before them; run on a thread of its own. It
            ends once the workers are closed.
    """

    def __init__(self, heal: Callable[[], None]) -> None:
        self._heal = heal
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def begin(self) -> None:
        """Heal, on a thread of its own; never blocks."""
        with self._lock:
            if self._is_closed:
                return
            self._threads = [each for each in self._threads if each.is_alive()]
            thread = threading.Thread(target=self._heal, name="phalanx-heal", daemon=True)
            self._threads.append(thread)
            thread.start()

    def refuse(self) -> None:
        """Begin no more."""
        with self._lock:
            self._is_closed = True

    def close(self, timeout: float) -> bool:
        """Begin no more; return whether all threads have ended within *timeout* seconds."""
        self.refuse()
        until = time.monotonic() + timeout
        others = [each for each in self._threads if each is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in others)
