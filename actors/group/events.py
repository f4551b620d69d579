"""What a group tells of itself: to the log, to those who trace and look on, to its listeners.

Guarantees: everyone is told the same events in the same order; nothing here raises or waits for
anybody's callback.

Left to others: what there is to tell.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.runtime import Scribe

    from .handle import Shared


class Herald:
    """Tells of the group called *name*."""

    def __init__(self, name: str, scribe: Scribe, shared: Shared) -> None:
        self._name = name
        self._scribe = scribe
        self._shared = shared

    def publish(self, event: Any) -> None:
        """Tell everyone of *event*."""
        self._scribe.emit(event)
        if self._shared.probe is not None:
            self._shared.probe.happened(event)
        self._shared.trace.hear(event)
        self._shared.deliver(event)

    def complain(self, error: BaseException) -> None:
        """Log *error*, which is a fault of ours."""
        trace = "".join(traceback.format_exception(error))
        with suppress(Exception):
            self._scribe.log.error("phalanx.executor_failed", group=self._name, trace=trace)

    def start_failed(self, error: BaseException) -> None:
        """Log *error*, for which ranks could not be started."""
        self._scribe.log.error("phalanx.start_failed", group=self._name, exc_info=error)

    def code_changed(self, worker: type[object], file: str | None, preload: Sequence[str]) -> None:
        """Log that *file*, which defines *worker*, has changed since ranks were started before."""
        runs = "the old code" if worker.__module__ in preload else "the new code"
        log = self._scribe.log
        log.warning("phalanx.worker_code_changed", group=self._name, file=file, starts_run=runs)

    def threads_limited(self, env: Mapping[str, str]) -> None:
        """Log with how many threads each worker computes, since nobody has set that."""
        self._scribe.log.info("phalanx.threads_limited", group=self._name, **env)

    def abandoned(self, who: dict[str, Any], left: str) -> None:
        """Log that a worker withstood SIGKILL and is left behind."""
        self._scribe.log.error("phalanx.worker_abandoned", **who, left=left)
