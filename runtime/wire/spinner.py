"""Adaptive spinner: polls before blocking, if polling has found messages recently.

It ends after the given time; while polls find nothing in that time they become rare, down to one
in 256 waits; the first that finds something restores them. A poll that loses its processor does not
count as a success: blocking is faster when other processes want to run.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_LONGEST_PAUSE: Final = 255  # waits; less than one in a hundred spins in vain


class Spinner:
    """The state of one waiting place. Used by one thread at a time."""

    def __init__(self) -> None:
        self._pause = 0
        self._left = 0

    def look(
        self, poll: Callable[[], _T], seconds: float, stop: Callable[[], object] = lambda: False
    ) -> _T | None:
        """Call *poll* until it returns something true, for *seconds*, or until *stop*; return that.

        Returns None without polling if that has not paid off. *poll* must not block; it should let
        other threads run.
        """
        if self._left:
            self._left -= 1
            return None
        until = time.monotonic() + seconds
        while not (found := poll()) and not stop() and time.monotonic() < until:
            # The awaited process may need this processor.
            os.sched_yield()
        if found and time.monotonic() < until:
            self._pause = 0
        else:
            self._pause = self._left = min(2 * self._pause + 1, _LONGEST_PAUSE)
        return found
