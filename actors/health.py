"""What a rank that does not answer is doing, as far as can be told from outside.

Guarantees: nothing is asked of the rank, which may not be able to answer: what counts is its own
page and what the kernel shows. It costs nothing until somebody asks.

Left to others: when a rank is taken for hung and ended (`watch`). A rank that sleeps in native code
while it holds the interpreter lock looks like one that waits: only its stacks tell them apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import Vitals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .executor_actor import RankInfo
    from .seat import Running


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one rank is doing; `state` is one of those of `Unhealthy`."""

    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({self.detail})" if self.detail else self.state


def diagnose(
    silent: Iterable[int],
    ranks: Iterable[RankInfo],
    running: Iterable[Running],
    before: Mapping[int, Vitals],
) -> dict[int, Diagnosis]:
    """Return what the *silent* ones are doing; *before* are vitals from a while ago."""
    infos = {info.rank: info for info in ranks}
    busy = {each.rank: each for each in running}
    now = time.monotonic()
    return {
        rank: _one(infos.get(rank), busy.get(rank), before.get(rank, Vitals()), now)
        for rank in silent
    }


def _one(info: RankInfo | None, running: Running | None, before: Vitals, now: float) -> Diagnosis:
    vitals = Vitals.of(info.pid) if info is not None and info.pid is not None else Vitals()
    if info is None or not vitals.state:
        return Diagnosis("dead")
    if vitals.state == "T":
        return Diagnosis("stopped")
    if info.state == "starting":
        return Diagnosis("starting")
    if info.state == "stopping":
        return Diagnosis("dead", "being stopped")
    if running is None or not running.began:
        return Diagnosis("waiting", "has begun no call")
    took = f"for {now - running.began:.1f} s"
    if running.limit is not None and now - running.began >= running.limit:
        return Diagnosis("hung", f"in {running.method} {took}")
    where = f"in {running.method} {took}" if running.method else took
    if vitals.ticks > before.ticks:
        return Diagnosis("busy", where)
    return Diagnosis("waiting", f"{where}{f', in {vitals.wait}' if vitals.wait else ''}")
