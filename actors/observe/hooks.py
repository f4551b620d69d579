"""Hooks for fault injection: what `phalanx.chaos` observes of groups, calls and workers.

Without an installed probe each hook costs a test for None. With one, a group passes these points in
the order in which things happen, under whatever lock is held there: hooks must not block or raise.

A probe is installed for the whole process, since executors are built by users' own code and by
supervisors' threads, to which no probe can be passed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from phalanx.actors.calls.call import CallTap
    from phalanx.actors.group.handle import Group
    from phalanx.actors.spec.context import WorkerContext
    from phalanx.actors.spec.options import ExecutorSpec

POINTS = ("before_send", "queued", "running", "after_reply", "restarting", "closing")
"""The points at which faults can be injected.

*running* and *after_reply* are passed in the worker (`Witness`), *before_send* and *queued* by a
call (`CallTap`), *restarting* and *closing* by its group (`GroupProbe`).
"""


class GroupProbe(Protocol):
    """Observes one group, in the driver."""

    def on_point(self, name: str, **fields: Any) -> None:
        """Note that the group passes a point.

        ``event`` (*event*, which the group publishes), ``planned`` (a restart of *ranks* or a
        resize to *size* begins), ``not_started`` (*ranks* got no process, for *reason*),
        ``restarting`` (*ranks* have just been given processes), ``closing`` (all ranks have been
        asked to stop). The *ranks* of the last ones are pairs of rank and incarnation.
        """
        ...

    def tap(
        self, name: str, method: Any, *, shape: str, rank: int | None, is_stream: bool
    ) -> CallTap:
        """Return the observer of a call that is being made."""
        ...

    def witness(self, rank: int, incarnation: int) -> bytes:
        """Return the pickled `Witness` for a worker that is being started."""
        ...


class Probe(Protocol):
    """Observes every group that this process builds."""

    def adjust(self, spec: ExecutorSpec) -> ExecutorSpec:
        """Return the spec to use in place of *spec*."""
        ...

    def attach(self, spec: ExecutorSpec, group: Group) -> GroupProbe:
        """Return the observer of the group that is being built."""
        ...


class Witness(Protocol):
    """Observes one worker, from within; pickled in the driver, by name or by value."""

    after_reply: Callable[[], None] | None
    """Called when a call has been answered."""

    def woke(self, context: WorkerContext, *, kept: bool) -> None:
        """``on_start`` is about to run, or ``on_reform`` if *kept*."""
        ...

    def invoke(
        self,
        run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any],
        method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wire: int,
    ) -> Any:
        """Run one call, of number *wire*, with what `CallTap.method` put in place of its method."""
        ...


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
