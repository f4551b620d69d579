"""Hooks of fault injection.

What may look on, and interfere, at named points of a group: for fault injection.

Guarantees: nothing of it costs anything where no probe is installed, beyond a test for None; with
one, everything a group does passes the points in the order in which it happens.

The points: ``before_send`` (a call is about to go to its ranks), ``queued`` (it has gone to a rank
that has others before it), ``running`` (a worker has begun it), ``after_reply`` (a worker has
answered it), ``restarting`` (ranks have been given processes anew), ``closing`` (the ranks have
been told to stop). Of these ``running`` and ``after_reply`` are passed in the worker.

A probe is installed for the whole process, which nothing else here is: what it looks at is built by
users' own code, or by a supervisor's thread, to which nobody could hand it.

Left to others: what a probe does (`phalanx.chaos`).

What looks on at one group, in the driver, where faults are injected.

Left to others: the points that are passed, and who looks on at all groups (`probe`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from phalanx.actors.calls.call import CallTap
    from phalanx.actors.group.handle import Shared
    from phalanx.actors.spec.context import WorkerContext
    from phalanx.actors.spec.options import ExecutorSpec


class GroupProbe(Protocol):
    """What looks on at one group, in the driver."""

    def tap(
        self, name: str, method: Any, *, shape: str, rank: int | None, is_stream: bool
    ) -> CallTap:
        """Return what looks on at a call that is being made."""
        ...

    def witness(self, rank: int, incarnation: int) -> bytes:
        """Return the pickled `Witness` for a worker that is being started."""
        ...

    def happened(self, event: Any) -> None:
        """The group publishes *event*."""
        ...

    def planned(self, ranks: frozenset[int], size: int | None) -> None:
        """A restart of *ranks*, or a resize, begins."""
        ...

    def not_started(self, ranks: tuple[tuple[int, int], ...], reason: str) -> None:
        """These (rank, incarnation) could not be given a process."""
        ...

    def restarting(self, ranks: tuple[tuple[int, int], ...]) -> None:
        """These (rank, incarnation) have just been given one; *restarting* is passed."""
        ...

    def closing(self) -> None:
        """The ranks have just been told to stop for good; *closing* is passed."""
        ...


POINTS = ("before_send", "queued", "running", "after_reply", "restarting", "closing")
"""The points by name."""


class Probe(Protocol):
    """What looks on at every group that this process builds."""

    def adjust(self, spec: ExecutorSpec) -> ExecutorSpec:
        """Return the spec to use in place of *spec*."""
        ...

    def attach(self, spec: ExecutorSpec, shared: Shared) -> GroupProbe:
        """Return what looks on at the group that is being built."""
        ...


class Witness(Protocol):
    """What looks on in a worker; pickled in the driver, by name or by value."""

    after_reply: Callable[[], None] | None
    """Called when a call has been answered, where *after_reply* is to be passed."""

    def woke(self, context: WorkerContext, *, kept: bool) -> None:
        """``on_start`` is about to run, or ``on_reform`` where *kept*."""
        ...

    def invoke(
        self,
        run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any],
        method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wire: int,
    ) -> Any:
        """Run one call, with what travelled in place of its method; *running* is passed.

        *wire* is the number of this sending of it.
        """
        ...


_installed: list[Probe] = []  # at most one


def current_probe() -> Probe | None:
    """Return the probe that is installed, if one is."""
    return _installed[-1] if _installed else None


@contextlib.contextmanager
def installed(probe: Probe) -> Generator[None, None, None]:
    """Have *probe* look on at every executor that is built while the block runs.

    Raises:
        SpecError: another one is installed; two would answer for each other's faults.
    """
    if _installed:
        raise SpecError("probe", probe, "another run is under way in this process; wait for it")
    _installed.append(probe)
    try:
        yield
    finally:
        _installed.remove(probe)
