"""`EventBus`: publishes a group's events to the log, tracing, the test hook and the subscribers.

All of them get the same events in the same order; nothing here raises, or waits for a callback.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.runtime import OutputCollector

    from .handle import Group


class EventBus:
    """The events of *group*, which `GroupActor` publishes."""

    def __init__(self, collector: OutputCollector, group: Group) -> None:
        self._collector = collector
        self._log = collector.log.bind(group=group.spec.name)
        self._group = group

    def publish(self, event: Any) -> None:
        """Publish *event*."""
        self._collector.emit(event)
        if self._group.probe is not None:
            self._group.probe.on_point("event", event=event)
        self._group.trace.hear(event)
        self._group.deliver(event)

    def complain(self, error: BaseException) -> None:
        """Log *error*, which is a fault of ours."""
        trace = "".join(traceback.format_exception(error))
        with suppress(Exception):
            self._log.error("phalanx.executor_failed", trace=trace)

    def start_failed(self, error: BaseException) -> None:
        """Log *error*, for which ranks could not be started."""
        self._log.error("phalanx.start_failed", exc_info=error)

    def code_changed(self, worker: type[object], file: str | None, preload: Sequence[str]) -> None:
        """Log that *file*, which defines *worker*, has changed since ranks were started before."""
        runs = "the old code" if worker.__module__ in preload else "the new code"
        self._log.warning("phalanx.worker_code_changed", file=file, starts_run=runs)

    def threads_limited(self, env: Mapping[str, str]) -> None:
        """Log with how many threads each worker computes, if no variable sets that."""
        self._log.info("phalanx.threads_limited", **env)

    def abandoned(self, who: dict[str, Any], left: str) -> None:
        """Log that a worker withstood SIGKILL and is left behind."""
        self._log.error("phalanx.worker_abandoned", **who, left=left)
