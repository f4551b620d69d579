"""Hooks for fault injection: points in groups, calls and workers that `phalanx.chaos` observes.

Without an installed probe each hook costs a test for None. With one, a group passes these points in
the order of events, under whichever lock is held there: hooks must not block or raise.

A probe is installed for the whole process, since executors are built by users' own code and by
supervisors' threads, to which no probe can be passed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from phalanx.actors.calls.call import Call
    from phalanx.actors.group.handle import Group
    from phalanx.actors.spec.context import WorkerContext
    from phalanx.actors.spec.options import ExecutorSpec

POINTS = ("before_send", "queued", "running", "after_reply", "restarting", "closing")
"""The points at which faults can be injected: of a call, in the worker, and of its group."""


class GroupProbe(Protocol):
    """Observes one group, in the driver."""

    def on_point(self, name: str, **fields: Any) -> None:
        """Note that the group passes a point.

        ``event`` (*event*, which the group publishes), ``planned`` (a restart of *ranks* or a
        resize to *size* begins), ``not_started`` (*ranks* got no process, for *reason*),
        ``restarting`` (*ranks* have just been given processes), ``closing`` (all ranks have been
        asked to stop). The *ranks* of the last ones are pairs of rank and incarnation.
        """

    def call_probe(self, name: str, method: Any, *, is_stream: bool) -> CallProbe:
        """Return the observer of a call that is being made."""
        ...

    def worker_probe(self, rank: int, incarnation: int) -> bytes:
        """Return the pickled `WorkerProbe` for a worker that is being started."""
        ...


class CallProbe(Protocol):
    """Observes one call, in the driver.

    Its methods are quick and raise nothing; all but `issued` and `take` run under the plane's lock.

    Attributes:
        method: The value sent to the workers in place of the method.
    """

    method: Any

    def issued(self, call: Call) -> None:
        """The call is about to be accepted."""

    def raised(self, error: BaseException) -> None:
        """The caller gets *error*: the call was not accepted, or is abandoned."""

    def before_send(self, call: Call, epoch: int, ranks: tuple[tuple[int, int], ...]) -> None:
        """The call is about to be sent to these (rank, incarnation)."""

    def queued(self) -> None:
        """A rank has the call behind others."""

    def settled(self, call: Call) -> None:
        """The call has its outcome."""

    def take(self, rank: int, value: Any) -> Any:
        """Return the method's value, given what *rank* answered."""


class Probe(Protocol):
    """Observes every group that this process builds."""

    def adjust(self, spec: ExecutorSpec) -> ExecutorSpec:
        """Return the spec to use in place of *spec*."""
        ...

    def attach(self, spec: ExecutorSpec, group: Group) -> GroupProbe:
        """Return the observer of the group that is being built."""
        ...


class WorkerProbe(Protocol):
    """Observes one worker, from within; pickled in the driver, by name or by value."""

    after_reply: Callable[[], None] | None
    """Called when a call has been answered."""

    def woke(self, context: WorkerContext, *, kept: bool) -> None:
        """``on_start`` is about to run, or ``on_reform`` if *kept*."""

    def invoke(
        self,
        run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any],
        method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wire: int,
    ) -> Any:
        """Run one call, of number *wire*; `CallProbe.method` stands in place of its method."""


_installed: list[Probe] = []  # at most one


def current_probe() -> Probe | None:
    """Return the installed probe."""
    return _installed[-1] if _installed else None


@contextlib.contextmanager
def installed(probe: Probe) -> Generator[None, None, None]:
    """Have *probe* observe every executor that is built while the block runs.

    Raises:
        SpecError: another one is installed.
    """
    if _installed:
        raise SpecError("probe", probe, "another run is under way in this process; wait for it")
    _installed.append(probe)
    try:
        yield
    finally:
        _installed.remove(probe)
