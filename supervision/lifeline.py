"""Links and monitors: who is told when something ends, and who ends with it.

Guarantees: everything that ends has one `Lifeline`, which ends once, with a reason. A monitor is
called exactly once, also where what it watches had ended before it was set, and never after it
was cancelled. A link carries a failure to the other side as a stop with that reason; as in Erlang,
a normal end crosses no link, and a side that traps is told instead of stopped.

Left to others: calling `Lifeline.end` (supervisors do it for their children; an executor does it
for itself and its ranks). Callbacks run on the thread that reports the end and must not block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from .exits import ExitKind, ExitReason

Watcher: TypeAlias = Callable[["Down"], None]
Cancel: TypeAlias = Callable[[], None]


class Down:
    """What a monitor is told: *path* ended because of *reason*."""

    __slots__ = ("path", "reason")
    __match_args__ = ("path", "reason")

    def __init__(self, path: str, reason: ExitReason) -> None:
        self.path = path
        self.reason = reason

    def __repr__(self) -> str:
        return f"Down({self.path!r}, {self.reason})"


class Lifeline:
    """The one end of one incarnation of something.

    Attributes:
        path: What it is, for those who are told of its end.
    """

    def __init__(self, path: str, terminate: Callable[[ExitReason], None] | None = None) -> None:
        self.path = path
        self._terminate = terminate
        self._lock = threading.Lock()
        self._watchers: dict[int, Watcher] = {}
        self._numbers = count()
        self._reason: ExitReason | None = None

    @property
    def reason(self) -> ExitReason | None:
        """Why it ended; None while it lives."""
        return self._reason

    def monitor(self, watcher: Watcher) -> Cancel:
        """Call *watcher* once when this ends, at once where it has; return what cancels that."""
        number = next(self._numbers)
        with self._lock:
            if (reason := self._reason) is None:
                self._watchers[number] = watcher
        if reason is not None:
            watcher(Down(self.path, reason))
            return _nothing

        def cancel() -> None:
            with self._lock:
                self._watchers.pop(number, None)

        return cancel

    def end(self, reason: ExitReason) -> bool:
        """End, tell the watchers; return False where it had ended before, and nobody is told."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            watchers, self._watchers = list(self._watchers.values()), {}
        for watcher in watchers:
            watcher(Down(self.path, reason))
        return True

    def terminate(self, reason: ExitReason) -> None:
        """Ask what this belongs to to end, if it still lives and can be asked."""
        if self._terminate is not None and self._reason is None:
            self._terminate(reason)


def link(one: Lifeline, other: Lifeline, *, on_down: Watcher | None = None) -> Cancel:
    """Tie *one* and *other* together: the failure of either stops the other.

    Args:
        one: One side.
        other: The other side; where *on_down* is given it traps: it is not stopped when *one*
            ends, *on_down* is called instead, for normal ends too.
        on_down: See *other*.

    Returns:
        What unties them.
    """
    forth = one.monitor(on_down or _stopper(other))
    back = other.monitor(_stopper(one))

    def unlink() -> None:
        forth()
        back()

    return unlink


def _stopper(linked: Lifeline) -> Watcher:
    def stop(down: Down) -> None:
        if down.reason.is_failure:
            linked.terminate(ExitReason(ExitKind.CRASH, f"linked {down.path}: {down.reason}"))

    return stop


def _nothing() -> None:
    pass
