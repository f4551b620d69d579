"""A handle of the executors of one supervised child, which outlives each of them.

- A call that finds its executor ended waits until the supervisor has restarted it, up to the call's
  timeout; a blocking call that was refused or queued by one that was ending is made again.
- A call that has been sent is not made again by the handle, because it may have run: it ends as
  `WorkerDied` or `ExecutorClosed` if its executor ends.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors.calls.call import check_timeout
from phalanx.supervision import (
    ExecutorClosed,
    WorkerDied,
    check_kind,
)
from phalanx.supervision import Supervisor as BaseSupervisor

from .aio import AsyncCalls, not_sent, outcome_of
from .calls import CallMethods
from .executor import Executor

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors.spec.results import Status
    from phalanx.actors.spec.worker import Methods

_RECHECK = 0.25  # seconds; not every change of a tree is announced


class SupervisedExecutor(CallMethods[Any]):
    """The executor that runs at *path* of a tree, whichever that is.

    It has the calls of `Executor`; a call with ``non_block=True`` blocks while there is none. They
    raise `SupervisorDown` once the tree has ended, and `ChildRefused` if nothing restarts the
    executor.
    """

    def __init__(self, tree: Supervisor, path: str) -> None:
        self.path = path
        self._lasting = _LastingGroup(tree, path)
        self.current()
        super().__init__(cast("Any", self._lasting))

    def current(self, timeout: float | None = None) -> Executor[Any]:
        """Return the executor that runs now, after its restart if one is under way.

        Raises:
            TimeoutError: There is none after *timeout* seconds.
        """
        return self._lasting.executor(timeout)

    @property
    def aio(self) -> AsyncCalls:
        """The same calls for asyncio; `tell` and `stream` do not wait for a restart."""
        return AsyncCalls(self._at_once())

    def status(self, timeout: float | None = None) -> Status:
        """Return the status of `current`."""
        return self.current(timeout).status()

    def __repr__(self) -> str:
        return f"<SupervisedExecutor {self.path!r}>"


class _LastingGroup:
    def __init__(self, tree: Supervisor, path: str) -> None:
        self._tree = tree
        self._path = path
        self._view: Status
        self.log: Any
        self.methods: Methods

    def executor(self, timeout: float | None, ended: Executor[Any] | None = None) -> Executor[Any]:
        """Return the executor that runs, or the one that follows *ended*."""
        found: Any = self._tree.wait_child(self._path, timeout, other_than=ended)
        check_kind(f"child {self._path}", found, Executor)
        executor: Executor[Any] = found
        group = executor.group
        self._view, self.log, self.methods = group.view, group.log, group.methods
        return executor

    def call(
        self, *args: Any, timeout: float | None = None, at_once: bool = False, **options: Any
    ) -> Any:
        if at_once and not options.get("tell") and options.get("stream") is None:
            return self._awaited(args, timeout, options)
        deadline, executor = _deadline(timeout), None
        while True:
            try:
                executor = self.executor(0.0 if at_once else _left(deadline), executor)
            except TimeoutError:
                raise not_sent(args[1], timeout) from None
            group = executor.group
            options |= {"timeout": _left(deadline), "at_once": at_once}
            try:
                return group.call(*args, **options)
            except (ExecutorClosed, WorkerDied) as error:
                if at_once or _may_have_run(error, group):
                    raise

    async def _awaited(
        self, args: tuple[Any, ...], seconds: float | None, options: dict[str, Any]
    ) -> Any:
        deadline = _deadline(seconds)
        changed, cancel, executor = asyncio.Event(), None, None
        try:
            while True:
                changed.clear()
                options |= {"timeout": _left(deadline), "at_once": True}
                try:
                    executor = self.executor(0.0, executor)
                except TimeoutError:
                    if deadline is not None and time.monotonic() >= deadline:
                        raise not_sent(args[1], seconds) from None
                else:
                    group = executor.group
                    call = functools.partial(group.call, *args, **options)
                    try:
                        return await outcome_of(group, args[1], options["timeout"], call)
                    except (ExecutorClosed, WorkerDied) as error:
                        if _may_have_run(error, group):
                            raise
                if cancel is None:
                    cancel = self._notify(changed)
                    continue
                with suppress(TimeoutError):
                    wait = min(_left(deadline) or _RECHECK, _RECHECK)
                    await asyncio.wait_for(changed.wait(), wait)
        finally:
            if cancel is not None:
                cancel()

    def _notify(self, changed: asyncio.Event) -> Callable[[], None]:
        """Set *changed* at each change of the tree, until what is returned is called."""
        loop = asyncio.get_running_loop()

        def tell(_notice: object) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(changed.set)

        return self._tree.subscribe(tell)

    def when_room(self, _wake: Callable[[], None]) -> None:
        """Each attempt waits for room in the executor's queue."""

    @property
    def view(self) -> Status:
        with suppress(TimeoutError):  # that of the last one, while there is none
            self.executor(0.0)
        return self._view


def _may_have_run(error: ExecutorClosed | WorkerDied, group: Any) -> bool:
    """Return whether *error* ends a call of *group* that was sent, or was raised by its method."""
    return error.sent or not (group.closing or group.is_failed)


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    check_timeout(timeout)
    return None if timeout == math.inf else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.001, deadline - time.monotonic())


class Supervisor(BaseSupervisor):
    """A running tree of supervisors and children, which may be executors.

    Attributes:
        spec: The spec of the tree.
        exits: Its own lifeline, for links and monitors.
    """

    def executor(self, path: str) -> SupervisedExecutor:
        """Return a handle of the executor at *path* that stays valid when that is restarted."""
        return SupervisedExecutor(self, path)
