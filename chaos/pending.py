"""Strikes that wait for a worker, and what it is told to do.

Guarantees: pure: which ranks of which call get an order follows from the strike and the shape of
the call.

Left to others: who is struck, and when (`striker`); carrying it out (`witness`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .envelope import Order
from .faults import FAULTS, WORKERS_POINTS

if TYPE_CHECKING:
    from .parts import Part
    from .recorder import Watched
    from .schedule import Strike

HELPERS = ("standby", "zygote", "store", "logs")
"""The targets that are processes of ours and no rank."""


@dataclass(slots=True)
class Pending:
    """A strike that waits for a worker to do it to itself."""

    strike: Strike
    group: Watched
    ranks: tuple[int, ...]
    out: set[str] = field(default_factory=set[str])  # the keys of orders under way


def is_by_worker(strike: Strike) -> bool:
    """Whether a worker carries *strike* out: to itself, or at a moment that only workers see."""
    within = FAULTS[strike.fault].how == "inside" and strike.target != "driver"
    return within or strike.point in WORKERS_POINTS


def whose_of(pending: Pending, shape: str, rank: int | None) -> tuple[int, ...]:
    """Return the ranks that a call of *shape* takes the order to."""
    if pending.strike.target in (*HELPERS, "driver"):  # any rank sees the moment
        return pending.ranks if shape in ("collective", "gather") else (-1,)
    if shape == "pool":
        return (-1,) if pending.strike.target == "random" else ()
    if shape == "single":
        return (rank,) if rank is not None and pending.ranks == (rank,) else ()
    return pending.ranks


def order_of(strike: Strike, rank: int, whom: Part | None = None) -> Order:
    """Return what *rank* is told to do: *strike*, to itself or to *whom*."""
    return Order(
        strike=strike.number,
        # What strikes one is one order, whichever calls it goes with: a rank may still be about
        # to carry it out, after its answer, when another is given it.
        key=f"{strike.number}-{rank}" if strike.target == "group" else f"{strike.number}",
        fault=strike.fault,
        target=strike.target,
        rank=rank,
        at=strike.point if strike.point in WORKERS_POINTS else "running",
        aimed=bool(strike.point),
        seconds=strike.seconds,
        whom=None if whom is None else (whom.pid, whom.ticks),
    )
