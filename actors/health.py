"""What a rank that does not answer is doing, as far as can be told from outside.

Guarantees: nothing is asked of its main loop: what counts is its own page, what the kernel shows,
and whether it gives a sign of life beside that loop. That tells one that waits, whose interpreter
runs, from one that is wedged, in which native code keeps everything else from running. It costs
nothing until somebody asks.

Left to others: when a rank is taken for hung and ended (`watch`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import Vitals

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from .pulses import Sign
    from .seat import Running
    from .status import RankInfo

_ASKING = 2  # clock ticks that the question for a sign of life may have cost


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
    signs: Mapping[int, Sign],
    *,
    gone: Container[int],
) -> dict[int, Diagnosis]:
    """Return what the *silent* ones are doing.

    Args:
        silent: Those that have not answered.
        ranks: All of them.
        running: What they run.
        before: Vitals from a while ago.
        signs: What came of asking for a sign of life.
        gone: Those that died meanwhile: who has their place now is not who was silent.
    """
    infos = {info.rank: info for info in ranks}
    busy = {each.rank: each for each in running}
    now = time.monotonic()
    return {
        rank: _one(
            infos.get(rank),
            busy.get(rank),
            before.get(rank, Vitals()),
            signs.get(rank),
            now,
            is_gone=rank in gone,
        )
        for rank in silent
    }


def _one(
    info: RankInfo | None,
    running: Running | None,
    before: Vitals,
    sign: Sign | None,
    now: float,
    *,
    is_gone: bool,
) -> Diagnosis:
    vitals = Vitals.of(info.pid) if info is not None and info.pid is not None else Vitals()
    pulse = sign.pulse if sign is not None else None
    silent = sign is not None and pulse is None
    place = f", in {vitals.wait}" if vitals.wait else ""
    if info is None or not vitals.state:
        return Diagnosis("dead")
    if info.state == "starting":
        return Diagnosis("stopped" if vitals.state == "T" else "starting")
    if is_gone:
        return Diagnosis("dead")
    if vitals.state == "T":
        return Diagnosis("stopped")
    if info.state == "stopping":
        return Diagnosis("dead", "being stopped")
    if running is None or not (running.began or running.method):
        where = "has begun no call"
    elif not running.began:
        where = f"in {running.method}, until its items are taken"
    else:
        where = f"in {running.method} " if running.method else ""
        where += f"for {now - running.began:.1f} s"
    if pulse is not None and pulse.where:
        where += f", at {pulse}"
    if running is not None and running.limit is not None and now - running.began >= running.limit:
        return Diagnosis("hung", where)
    used = vitals.ticks - before.ticks
    if used > _ASKING or (used and vitals.state == "R"):
        return Diagnosis("busy", f"{where}, holds the interpreter lock" if silent else where)
    if vitals.state == "D" and silent:
        return Diagnosis("wedged", f"{where}, uninterruptible{place}")
    if silent:
        return Diagnosis("wedged", f"{where}, native code holds the interpreter lock{place}")
    return Diagnosis("waiting", f"{where}{place}")
