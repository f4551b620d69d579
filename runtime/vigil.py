"""What one launch sees to while it waits for a zygote.

Guarantees: a launch that nobody wants any more waits no longer; a zygote that is stopped, and not
by a debugger, is killed after two seconds of it, for it would fork nobody and nothing else would
find it.

Left to others: its replacement, and beginning anew (`forking`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK = 0.25
"""Seconds between two looks."""

_LOOKS = 8  # how often in a row it may be found stopped; counted, for this process may stop too


class Waited(Protocol):
    """Whom a launch waits for: the zygote."""

    def is_stopped(self) -> bool: ...  # noqa: D102  # it says so itself
    def kill(self) -> None: ...  # noqa: D102  # as above


class Vigil:
    """One launch's. Used by one thread.

    Args:
        what: What is being launched, for people.
        is_wanted: Whether it is still wanted.
    """

    def __init__(self, what: str, is_wanted: Callable[[], bool]) -> None:
        self._what = what
        self._is_wanted = is_wanted
        self._stopped = 0

    def check(self) -> None:
        """Raise RuntimeFault where the launch is not wanted any more."""
        if not self._is_wanted():
            msg = f"{self._what!r} was withdrawn before it had been started"
            raise RuntimeFault(msg)

    def look(self, zygote: Waited) -> bool:
        """Return whether *zygote*, which has said nothing for a while, had to be killed for it."""
        self._stopped = self._stopped + 1 if zygote.is_stopped() else 0
        if self._stopped <= _LOOKS:
            return False
        self._stopped = 0
        zygote.kill()
        return True


def always() -> bool:
    """Say that something is wanted, whatever happens."""
    return True
