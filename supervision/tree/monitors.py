"""Links and monitors: who is told when something ends, and who ends with it.

Guarantees: everything that ends has one `Lifeline`, which ends once, with a reason. A monitor is
called exactly once, also where what it watches had ended before it was set, and never after it
was cancelled; one that raises is reported and keeps nobody else from being told. A link carries
every reason but ``normal`` to the other side, unchanged, as in Erlang: that side is asked to end
with it. A side that traps is told instead, of every end.

Left to others: calling `Lifeline.end` (supervisors do it for their children; an executor does it
for itself and its ranks). Callbacks run on the thread that reports the end and must not block.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any, TypeAlias

from phalanx.supervision.core.policy import ExitKind, ExitReason
from phalanx.supervision.errors import error_text

Watcher: TypeAlias = Callable[["Down"], None]
Failed: TypeAlias = Callable[[str, BaseException], None]
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

    def __init__(
        self,
        path: str,
        terminate: Callable[[ExitReason], None] | None = None,
        *,
        failed: Failed | None = None,
    ) -> None:
        """Begin the lifeline of *path*.

        Args:
            path: See above.
            terminate: What asks it to end, for links.
            failed: Told of the path and of what a watcher raised; None for the log.
        """
        self.path = path
        self._terminate = terminate
        self._failed = failed or _logged
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
            self._tell(watcher, reason)
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
            self._tell(watcher, reason)
        return True

    def _tell(self, watcher: Watcher, reason: ExitReason) -> None:
        try:
            watcher(Down(self.path, reason))
        except BaseException as error:  # noqa: BLE001 # the other watchers, and whoever reports the end, go on
            self._failed(self.path, error)

    def terminate(self, reason: ExitReason) -> None:
        """Ask what this belongs to to end, if it still lives and can be asked."""
        if self._terminate is not None and self._reason is None:
            self._terminate(reason)


def link(one: Lifeline, other: Lifeline, *, on_down: Watcher | None = None) -> Cancel:
    """Tie *one* and *other* together: either ends with the other, but for a normal end.

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
        if down.reason.kind is not ExitKind.NORMAL:
            linked.terminate(down.reason)

    return stop


def _nothing() -> None:
    pass


def stderr_logger() -> Any:
    """Return the program's structlog logger where it has configured structlog, else one to stderr.

    What structlog does unconfigured is to print to stdout, among what the program itself prints.
    """
    import structlog  # noqa: PLC0415 # `import phalanx` stays quick

    if structlog.is_configured():
        return structlog.get_logger("phalanx")
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr))


def _logged(path: str, error: BaseException) -> None:
    stderr_logger().warning(
        "phalanx.callback_failed", path=path, callback="monitor", error=error_text(error)
    )
