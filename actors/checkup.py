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
    from collections.abc import Callable
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
    if not _is_done(future, deadline - asking):
        before = {info.rank: Vitals.of(info.pid) for info in ranks}
        with shared.pulses.ask({info.rank: info.incarnation for info in ranks}) as asked:
            if not _is_done(future, deadline):
                asked.wait(deadline + PATIENCE - asking)
            signs = asked.signs()
    try:
        silent = [each.rank for each in future.result() if each.kind is not OutcomeKind.OK]
    except CallTimeout:  # it was never sent: the group is not whole
        silent = [info.rank for info in shared.view.ranks]
    if not silent:
        return
    check_open()
    diagnoses = diagnose(silent, shared.view.ranks, shared.plane.seating.running(), before, signs)
    states = {rank: each.state for rank, each in diagnoses.items()}
    details = {rank: str(each) for rank, each in diagnoses.items()}
    raise Unhealthy("check_health", silent, timeout, states, details)


def _is_done(future: Future[Any], deadline: float) -> bool:
    """Return whether *future* is done by *deadline* (monotonic)."""
    with suppress(TimeoutError):
        future.exception(max(0.0, deadline - time.monotonic()))
    return future.done()


def _ping(_worker: object) -> None:
    """Answer, from the main loop."""
