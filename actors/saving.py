"""The calls by which an executor itself has its ranks store their state.

Guarantees: such a call goes to every rank, in its turn among the user's calls, and does nothing
but what every call can: have the state stored with it. It may run twice.

Left to others: what is stored and kept (`cuts`), which of the user's calls it is stored with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from phalanx.runtime import encode
from phalanx.supervision import Strategy

from .calls import Call
from .cuts import Cuts
from .terms import Shape, check_timeout, terms_of
from .worker import declared_limit

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .plane import Plane
    from .spec import ExecutorSpec

_RETRIES = 3  # deaths in a row that one outlives; arbitrary


def saving_call(plane: Plane, seq: int, timeout: float | None, now: float) -> Call:
    """Return a call with which every rank stores its state."""
    if timeout is not None:
        check_timeout(timeout)
    terms = terms_of(now=now, timeout=timeout, on_death="retry", retries=_RETRIES)
    payload = plane.pack(encode((_nothing, (), dict[str, Any]()), "checkpoint"))
    call = Call(seq, "checkpoint", Shape.COLLECTIVE, [payload], terms)
    call.cuts = []
    return call


def save_now(plane: Plane, cuts: Cuts, call: Call, *, under_hold: bool = False) -> Checkpoint:
    """Have every rank store its state with *call*; return what has been stored.

    Args:
        plane: The group's.
        cuts: As above.
        call: Made by `saving_call`.
        under_hold: New calls are being held back, and this one is not.

    Raises:
        CallTimeout, WorkerDied, ExecutorClosed: as any call.
        Exception: what `WorkerActor.checkpoint` raised on a rank.
    """
    call.under_hold = under_hold
    try:
        plane.insert(call, first=under_hold)
        if not plane.wait(call, call.terms.deadline):
            plane.expire(call)
    except BaseException:
        plane.cancel(call)
        raise
    call.result()
    return cuts.outcome(call)


def cuts_of(spec: ExecutorSpec) -> Cuts | None:
    """Return what keeps the states of an executor's ranks, where they are to be kept."""
    if spec.checkpoint is None:
        return None
    together = spec.strategy is not Strategy.ONE_FOR_ONE
    limit = declared_limit(spec.worker.checkpoint, spec.hang_after)
    return Cuts(
        spec.checkpoint,
        spec.snapshots,
        together=together,
        limit=None if limit == math.inf else limit,
        sealed=spec.transport is not None,
    )


def _nothing(_worker: object) -> None:
    """Do nothing."""
