"""Monitors and links, as in Erlang.

- Every start of a child, and every tree, has one `Lifeline`, which ends once, with a reason.
- A monitor is called exactly once, at once if its lifeline has ended, and never after it was
  cancelled; one that raises is reported, and the others are still called. It runs on the thread
  that reports the end and must not block.
- A link carries every reason but ``normal`` to the other side, which is requested to end with it; a
  side that traps is called instead, for every end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeAlias

from phalanx.supervision.core.restart_rules import ExitKind, ExitReason
from phalanx.supervision.validate import check_callable


class Down(NamedTuple):
    """The argument of a monitor: *path* ended because of *reason*."""

    path: str
    reason: ExitReason


Watcher: TypeAlias = Callable[[Down], None]
Cancel: TypeAlias = Callable[[], None]


class Lifeline:
    """The end of one incarnation of *path*.

    *terminate* requests its end, for links; *failed* is called with the path, ``monitor`` and an
    exception of a watcher. *reason* is that of its end; None before.
    """

    def __init__(
        self,
        path: str,
        terminate: Callable[[ExitReason], None],
        failed: Callable[[str, str, BaseException], None],
    ) -> None:
        self.path, self._terminate, self._failed = path, terminate, failed
        self._lock = threading.RLock()  # a finalizer may interrupt its holder
        self._watchers: list[Watcher] = []
        self.reason: ExitReason | None = None

    def monitor(self, watcher: Watcher) -> Cancel:
        """Call *watcher* once when this ends, at once if it has; return a function that cancels."""
        check_callable("watcher", watcher)
        with self._lock:
            if (reason := self.reason) is None:
                self._watchers.append(watcher)
        if reason is not None:
            self._call(watcher, reason)

        def cancel() -> None:
            with self._lock, suppress(ValueError):
                self._watchers.remove(watcher)

        return cancel

    def end(self, reason: ExitReason) -> None:
        """End and call the watchers, unless it had ended before."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
        while True:
            with self._lock:  # each in its turn: one may cancel another
                if not self._watchers:
                    return
                watcher = self._watchers.pop(0)
            self._call(watcher, reason)

    def _call(self, watcher: Watcher, reason: ExitReason) -> None:
        try:
            watcher(Down(self.path, reason))
        except BaseException as error:  # noqa: BLE001 # the other watchers are still called
            self._failed(self.path, "monitor", error)

    def follow(self, down: Down) -> None:
        """Ask for the end with that of another, unless this has ended or that was normal."""
        if self.reason is None and down.reason.kind is not ExitKind.NORMAL:
            self._terminate(down.reason)


def link(one: Lifeline, other: Lifeline, *, on_down: Watcher | None = None) -> Cancel:
    """Link *one* and *other*: either ends with the other, except after a normal end.

    With *on_down* the side of *other* traps: it gets no stop request when *one* ends, *on_down* is
    called instead, for normal ends too. The end of either ends the link. Returns a function that
    unlinks them.
    """
    cancels: list[Cancel] = []

    def unlink() -> None:
        for cancel in cancels:
            cancel()

    def carry(watcher: Watcher, down: Down) -> None:
        unlink()  # the side that lives on would keep the other for each link that it ever had
        watcher(down)

    cancels.append(one.monitor(partial(carry, on_down or other.follow)))
    cancels.append(other.monitor(partial(carry, one.follow)))
    if one.reason is not None or other.reason is not None:
        unlink()
    return unlink
