"""Who is told that an engine's workers have ended for good, and that it is told once.

Guarantees: whoever is named before the end is called at it, and whoever is named after it at once;
each exactly once, from whichever threads the two come; no lock is held meanwhile.

Left to others: noticing the end (`executor`). Needs nothing of vLLM.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class FailureBell:
    """One engine's failure callback."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None
        self._has_rung = False

    def name(self, callback: Callable[[], None]) -> None:
        """Have *callback* called at the end, in place of an earlier one; now where that was."""
        with self._lock:
            if not self._has_rung:
                self._callback = callback
                return
        callback()

    def ring(self) -> None:
        """Call who has been named; any number of times."""
        with self._lock:
            self._has_rung = True
            callback, self._callback = self._callback, None
        if callback is not None:
            callback()
