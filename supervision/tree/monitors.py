"""Monitors and links, as in Erlang.

- Everything that ends has one `Lifeline`, which ends once, with a reason.
- A monitor is called exactly once, at once if its lifeline has ended, and never after it was
  cancelled; one that raises is reported, and the others are still called. It runs on the thread
  that reports the end and must not block.
- A link carries every reason but ``normal`` to the other side, which is asked to end with it; a
  side that traps is called instead, for every end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from phalanx.supervision.core.policy import ExitKind, ExitReason
from phalanx.supervision.errors import error_text


class Down(NamedTuple):
    """What a monitor is called with: *path* ended because of *reason*."""

    path: str
    reason: ExitReason


Watcher: TypeAlias = Callable[[Down], None]
Cancel: TypeAlias = Callable[[], None]


class Lifeline:
    """The end of one incarnation of *path*.

    *terminate* asks it to end, for links; *failed* is called with the path and an exception of a
    watcher, which is logged without it.
    """

    def __init__(
        self,
        path: str,
        terminate: Callable[[ExitReason], None] | None = None,
        *,
        failed: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self.path = path
        self._terminate = terminate
        self._failed = failed or _logged
        self._lock = threading.Lock()
        self._watchers: list[Watcher] = []
        self._reason: ExitReason | None = None

    @property
    def reason(self) -> ExitReason | None:
        """The reason of its end; None before."""
        return self._reason

    def monitor(self, watcher: Watcher) -> Cancel:
        """Call *watcher* once when this ends, at once if it has; return a function that cancels."""
        with self._lock:
            if (reason := self._reason) is None:
                self._watchers.append(watcher)
        if reason is not None:
            self._call(watcher, reason)

        def cancel() -> None:
            with self._lock, suppress(ValueError):
                self._watchers.remove(watcher)

        return cancel

    def end(self, reason: ExitReason) -> bool:
        """End and call the watchers; return False, and call none, if it had ended before."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            self._call(watcher, reason)
        return True

    def _call(self, watcher: Watcher, reason: ExitReason) -> None:
        try:
            watcher(Down(self.path, reason))
        except BaseException as error:  # noqa: BLE001 # the other watchers are still called
            self._failed(self.path, error)

    def terminate(self, reason: ExitReason) -> None:
        """Ask for the end, if it has not ended and can be asked."""
        if self._terminate is not None and self._reason is None:
            self._terminate(reason)


def link(one: Lifeline, other: Lifeline, *, on_down: Watcher | None = None) -> Cancel:
    """Link *one* and *other*: either ends with the other, except after a normal end.

    With *on_down* the side of *other* traps: it is not asked to end when *one* ends, *on_down* is
    called instead, for normal ends too. Returns a function that unlinks them.
    """
    cancels = one.monitor(on_down or _terminates(other)), other.monitor(_terminates(one))

    def unlink() -> None:
        for cancel in cancels:
            cancel()

    return unlink


def _terminates(linked: Lifeline) -> Watcher:
    def terminate(down: Down) -> None:
        if down.reason.kind is not ExitKind.NORMAL:
            linked.terminate(down.reason)

    return terminate


def stderr_logger() -> Any:
    """Return the program's structlog logger if structlog is configured, else one to stderr.

    Unconfigured, structlog prints to stdout, among the program's own output.
    """
    import structlog  # noqa: PLC0415 # `import phalanx` stays quick

    if structlog.is_configured():
        return structlog.get_logger("phalanx")
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr))


def _logged(path: str, error: BaseException) -> None:
    text = error_text(error)
    stderr_logger().warning("phalanx.callback_failed", path=path, callback="monitor", error=text)
