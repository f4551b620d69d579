"""Looking for a message before sleeping, where it has been worth it.

Guarantees: it ends after the time it is given; while looks find nothing they become rare, down to
one in 256 waits; the first that finds something brings them back. So who serves calls that take
their time, or shares a processor with whom it waits for, hardly looks at all.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_LONGEST_PAUSE: Final = 255  # waits; so less than one in a hundred takes longer for a look in vain


def _never() -> bool:
    return False


class Spinner:
    """One waiting place. Used by one thread at a time."""

    def __init__(self) -> None:
        self._pause = 0
        self._left = 0

    def look(
        self, poll: Callable[[], _T], seconds: float, stop: Callable[[], bool] = _never
    ) -> _T | None:
        """Return what *poll* returns, as soon as that is true, or after *seconds*, or on *stop*.

        None where it is not worth it. *poll* must not wait; it should let other threads run.
        """
        if self._left:
            self._left -= 1
            return None
        until = time.monotonic() + seconds
        while not (found := poll()):
            if time.monotonic() >= until or stop():
                self._pause = self._left = min(2 * self._pause + 1, _LONGEST_PAUSE)
                return found
            # Who is waited for may be due on this very processor once we sleep.
            os.sched_yield()
        self._pause = 0
        return found
