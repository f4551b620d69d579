"""Events as they come, to be waited for."""

from __future__ import annotations

import threading
from typing import Any

from phalanx.actors import Executor

LONG = 60.0  # seconds; no test takes them unless something is broken


class EventRecorder:
    """The events of one kind of an executor, or all of them."""

    def __init__(self, ex: Executor[Any], kind: type = object) -> None:
        self.kind = kind
        self.seen: list[Any] = []
        self._news = threading.Condition()
        ex.subscribe(self._on_event)

    def _on_event(self, event: Any) -> None:
        with self._news:
            if isinstance(event, self.kind):
                self.seen.append(event)
                self._news.notify_all()

    def every(self, kind: type) -> list[Any]:
        """Return those of *kind*, so far."""
        return [event for event in self.seen if isinstance(event, kind)]

    def wait(self, count: int = 1, kind: type = object) -> list[Any]:
        """Return those of *kind*, once there are *count*."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.every(kind)) >= count, LONG), self.seen
            return self.every(kind)
