"""An executor's group whose one rank runs in the caller's own thread; see `InlineRank`.

Guarantees: what is refused between processes is refused here, in the same words.

Left to others: deaths, limits and retries, which need a process.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import structlog

from phalanx.supervision import ExecutorClosed

from .checks import check_seconds
from .inline import InlineRank
from .notices import Emitted
from .outcomes import Outcome, OutcomeKind
from .status import status_of
from .streams import InlineStream
from .terms import Shape, check_timeout, terms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.supervision import ExitReason

    from .checkpoint import Checkpoint
    from .incoming import Incoming
    from .spec import ExecutorSpec
    from .status import GroupView, RankInfo, Status
    from .terms import OnDeath, OnTimeout
    from .worker import Methods


class InlineGroup:
    """Rank 0 of 1; its methods are those of `RankGroup`."""

    def __init__(self, spec: ExecutorSpec, methods: Methods) -> None:
        self._name = spec.name
        self.log = structlog.get_logger(group=spec.name)
        self._methods = methods
        self._numbers = itertools.count()
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self._closed = False
        self._rank = InlineRank(spec, self._emitted)

    def call(
        self,
        shape: Shape,
        method: str | Callable[..., Any],
        each: list[tuple[tuple[Any, ...], Mapping[str, Any]]],
        *,
        timeout: float | None = None,
        on_death: OnDeath | None = None,
        retries: int = 1,
        on_timeout: OnTimeout = "leave",
        want: int | None = None,
        rank: int | None = None,
        non_block: bool = False,
        tell: bool = False,
        stream: Incoming | None = None,
        aggregate: Callable[[list[Any], int], Any] | None = None,
        lead: int = 0,
    ) -> Any:
        """Run a call here and now, and return its value, its future or its stream."""
        if timeout is not None:
            check_timeout(timeout)
        name, _ = self._methods.declared_of(method, each)
        terms_of(
            now=0.0,
            timeout=timeout,
            on_death=on_death or "fail",
            retries=retries,
            on_timeout=on_timeout,
            tell=tell,
        )
        self.check_open()
        if stream is not None:
            return InlineStream(self._rank.stream(name, method, *each[0], rank))
        future: Future[Any] = Future()
        try:
            value = self._rank.run(name, method, *each[0])
        except Exception as error:  # noqa: BLE001  # settled below, as from a process
            if shape is Shape.GATHER:
                future.set_result([Outcome(0, OutcomeKind.ERROR, error=error)])
            else:
                future.set_exception(error)
        else:
            if shape is Shape.GATHER:
                value = [Outcome(0, OutcomeKind.OK, value)]
            elif shape is Shape.COLLECTIVE and aggregate is not None:
                value = aggregate([value], lead)
            elif shape is Shape.COLLECTIVE and want is None:
                value = [value]
            future.set_result(value)
        return future if non_block else future.result()

    # --- looking ------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a call would be accepted without blocking."""
        return True

    @property
    def is_failed(self) -> bool:
        """Whether it has ended by itself, for which it has no process."""
        return False

    def view(self) -> GroupView:
        """Return what it looks like."""
        return self._rank.view()

    def ranks(self) -> tuple[RankInfo, ...]:
        """Return its one rank."""
        return self._rank.view().ranks

    def status(self) -> Status:
        """Return how the executor is doing."""
        return status_of(
            self._name,
            self._rank.view(),
            state="ended" if self._closed else "serving",
            devices=self._rank.devices(),
        )

    def check_health(self, timeout: float) -> None:
        """Return at once: its main loop is the caller."""
        check_seconds("timeout", timeout)
        self.check_open()

    def when_failed(self, callback: Callable[[ExitReason], None]) -> None:
        """Forget *callback*: it never comes to that."""

    def listen(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Hand what the worker emits to *callback*, in the caller's thread."""
        number = next(self._numbers)
        self._listeners[number] = callback

        def leave() -> None:
            self._listeners.pop(number, None)

        return leave

    def check_open(self) -> None:
        """Raise `ExecutorClosed` where it takes no calls any more."""
        if self._closed:
            msg = f"executor {self._name} was closed; build a new one"
            raise ExecutorClosed(msg)

    # --- changing -----------------------------------------------------------------------

    def save(self, timeout: float | None) -> Checkpoint:
        """Never asked: a spec with a checkpoint policy is not inline."""
        raise NotImplementedError

    def reserve(self, world_size: int) -> None:
        """Do nothing: a rank in this process has no descriptors."""

    def change(self, *_: object, **__: object) -> None:
        """Change nothing: there is one rank, and no process to restart."""
        self.check_open()

    def drain(self, timeout: float | None) -> None:  # noqa: ARG002  # as above
        """Return at once: nothing is ever in flight."""
        self.check_open()

    # --- ending -------------------------------------------------------------------------

    def close(self) -> None:
        """End it."""
        self._closed = True
        self._rank.close()

    request_close = kill = close

    def _emitted(self, rank: int, value: Any) -> None:
        event = Emitted(self._name, rank, 1, 1, value, time.monotonic())
        for listener in list(self._listeners.values()):
            listener(event)
