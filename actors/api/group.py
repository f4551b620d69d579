"""The rank group of an executor, as its users' threads see it: called, looked at, changed, ended.

Guarantees: whoever waits here has a deadline, or waits for something that has one; nothing waits on
the thread of the callbacks.

Left to others: making calls (`Caller`), the end (`Core`), when ranks come and go
(`executor_actor`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.actors.health.diagnosis import check_up
from phalanx.actors.spec.results import status_of
from phalanx.actors.spec.validate import check_seconds
from phalanx.supervision import Phase

from .client import Caller

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors.group.handle import Core
    from phalanx.actors.group.messages import Planned
    from phalanx.actors.spec.checkpoint_policy import Checkpoint
    from phalanx.actors.spec.results import GroupView, RankInfo, Status
    from phalanx.actors.spec.worker import Methods
    from phalanx.supervision import ExitReason

_SETTLED = (Phase.SERVING, Phase.CLOSING, Phase.ENDED)


class RankGroup:
    """The ranks of *core*, whose worker class has *methods*."""

    def __init__(self, core: Core, methods: Methods) -> None:
        self.core = core
        self._shared = core.shared
        self._plane = core.shared.plane
        self._caller = Caller(core, methods)
        self.call = self._caller.call

    # --- looking ------------------------------------------------------------------------

    @property
    def log(self) -> Any:
        """The logger for what has become of its calls."""
        return self.core.runtime.scribe.log.bind(group=self.core.spec.name)

    @property
    def has_room(self) -> bool:
        """Whether a call would be accepted without blocking."""
        return self._plane.has_room()

    @property
    def is_failed(self) -> bool:
        """Whether it has ended by itself."""
        return self._shared.cause is not None

    def view(self) -> GroupView:
        """Return what it looks like."""
        return self._shared.view

    def ranks(self) -> tuple[RankInfo, ...]:
        """Return its ranks, and what each is running."""
        running = self._plane.seated()
        return tuple(
            replace(info, doing=running[info.rank].doing) if info.rank in running else info
            for info in self._shared.view.ranks
        )

    def status(self) -> Status:
        """Return how the executor is doing."""
        shared = self._shared
        view = shared.view
        return status_of(
            self.core.spec.name,
            view,
            state=str(view.phase),
            checkpoint=None if shared.cuts is None else shared.cuts.kept.latest(),
            counts=self._plane.counts(),
            devices=shared.devices(),
        )

    def check_health(self, timeout: float) -> None:
        """See `Executor.check_health`."""
        check_up(self._shared, self.call, self.check_open, timeout)

    def when_failed(self, callback: Callable[[ExitReason], None]) -> None:
        """See `Executor.register_failure_callback`."""
        self._shared.when_failed(callback)

    def listen(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """See `Executor.events`."""
        return self._shared.listen(callback)

    def check_open(self) -> None:
        """Raise `ExecutorClosed` where it takes no calls any more, or not from this process."""
        self.core.check_process()
        self._plane.check_open()

    # --- changing -----------------------------------------------------------------------

    def save(self, timeout: float | None) -> Checkpoint:
        """See `Executor.checkpoint`."""
        self.core.check_process()
        self._check_may_wait("checkpoint")
        return self._caller.save(timeout, under_hold=False)

    def reserve(self, world_size: int) -> None:
        """Have descriptors for *world_size* ranks; raises SpecError where there are too few."""
        self.check_open()
        self.core.reserve(world_size)

    def change(
        self, make: Callable[[], Planned], timeout: float | None, *, force: bool = False
    ) -> None:
        """Have a planned change carried out while nothing is in flight; tries until it is.

        With *force* calls may be in flight, and no state is stored.
        """
        self._check_may_wait("a planned change")
        self.check_open()
        limit = None if timeout is None else check_seconds("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit
        shared = self._shared
        while True:
            with shared.changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not shared.changed.wait_for(lambda: shared.view.phase in _SETTLED, left):
                    msg = f"the group is not whole after {timeout:g} s; nothing was changed"
                    raise TimeoutError(msg)
            self.check_open()
            try:
                if not force and not self._plane.holding.wait_idle(deadline):
                    msg = f"calls are still in flight after {timeout:g} s; nothing was changed"
                    raise TimeoutError(msg)
                if not force and shared.cuts is not None and shared.cuts.is_unsaved():
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    self._caller.save(left, under_hold=True)
                plan = make()
                self.core.tell(plan)
                while not plan.done.wait(max(0.01, _until(deadline, 1.0))):
                    if shared.gone.is_set():
                        break
                    if plan.accepted and deadline is not None and time.monotonic() >= deadline:
                        msg = f"the change is under way, not done after {timeout:g} s; it goes on"
                        raise TimeoutError(msg)
            finally:
                self._plane.holding.resume()
            if plan.accepted:
                return
            self.check_open()

    def drain(self, timeout: float | None) -> None:
        """See `Executor.drain`."""
        self._check_may_wait("drain")
        self.check_open()
        limit = None if timeout is None else check_seconds("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit
        try:
            if not self._plane.holding.wait_idle(deadline, every_call=True):
                msg = f"calls are still without an outcome after {timeout:g} s"
                raise TimeoutError(msg)
        finally:
            self._plane.holding.resume()

    def _check_may_wait(self, what: str) -> None:
        self._plane.check_may_enter(what, waits=True)
        self._shared.callbacks.check_may_wait(what)

    # --- ending -------------------------------------------------------------------------

    def close(self) -> None:
        """End it, and wait for that."""
        self.core.end()

    def request_close(self) -> None:
        """Ask for its end; returns at once."""
        self.core.request_end()

    def kill(self) -> None:
        """Kill every rank, and have it end; returns at once."""
        self.core.kill()


def _until(deadline: float | None, longest: float) -> float:
    """Return how long to wait for *deadline*, in pieces of no more than *longest* seconds."""
    return longest if deadline is None else min(longest, max(0.0, deadline - time.monotonic()))
