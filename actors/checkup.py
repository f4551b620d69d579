"""Whether every rank's main loop answers, and what those are doing that do not.

Guarantees: whoever answers in time is not looked at; those that do not are asked for a sign of life
beside their main loops, and diagnosed, before anything is raised.

Left to others: what the signs mean (`health`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phalanx.runtime import Vitals
from phalanx.supervision import CallTimeout, Unhealthy

from .checks import check_seconds
from .health import diagnose
from .outcomes import OutcomeKind
from .pulses import PATIENCE
from .terms import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from .pulses import Sign
    from .shared import Shared


def check_up(
    shared: Shared, call: Callable[..., Any], check_open: Callable[[], None], timeout: float
) -> None:
    """Return once every rank has answered.

    Args:
        shared: The group's.
        call: Makes a call of it, as `Caller.call`.
        check_open: Raises where there is no group any more.
        timeout: Seconds for the answers.

    Raises:
        Unhealthy: see `Executor.check_health`.
    """
    shared.callbacks.check_may_wait("check_health")
    ranks = shared.view.ranks
    deadline = time.monotonic() + check_seconds("timeout", timeout)
    ping = [((), dict[str, Any]())]
    future = call(Shape.GATHER, _ping, ping, timeout=timeout, on_death="fail", non_block=True)
    before: dict[int, Vitals] = {}
    signs: dict[int, Sign] = {}
    asking = min(PATIENCE, timeout / 2)
    there = {info.rank: info.incarnation for info in ranks}
    late, gone = set(there), set[int]()
    if _is_done(future, deadline - asking):
        late, gone = _silent(future, there)
    if late:  # so far, or when this was woken long after the deadline
        before = {info.rank: Vitals.of(info.pid) for info in ranks}
        with shared.pulses.ask(there) as asked:
            late, gone = _silent(future, there)  # its own deadline ends that
            asked.wait(late, time.monotonic() + PATIENCE - asking)
            signs = asked.signs()
    if not late and not gone:
        return
    check_open()
    silent = sorted(late | gone)
    now = shared.view.ranks
    gone |= {info.rank for info in now if there.get(info.rank) != info.incarnation}
    running = shared.plane.seating.running()
    diagnoses = diagnose(silent, now, running, before, signs, gone=gone)
    states = {rank: each.state for rank, each in diagnoses.items()}
    details = {rank: str(each) for rank, each in diagnoses.items()}
    raise Unhealthy("check_health", silent, timeout, states, details)


def _silent(future: Future[Any], there: Iterable[int]) -> tuple[set[int], set[int]]:
    """Return who of those *there* has not answered in time, and who died before it could."""
    try:
        outcomes = future.result()
    except CallTimeout:  # it was never sent: the group is not whole
        return set(there), set()
    late = {each.rank for each in outcomes if each.kind not in (OutcomeKind.OK, OutcomeKind.DEAD)}
    return late, {each.rank for each in outcomes if each.kind is OutcomeKind.DEAD}


def _is_done(future: Future[Any], deadline: float) -> bool:
    """Return whether *future* is done by *deadline* (monotonic)."""
    with suppress(TimeoutError):
        future.exception(max(0.0, deadline - time.monotonic()))
    return future.done()


def _ping(_worker: object) -> None:
    """Answer, from the main loop."""
