"""What a rank is doing that does not answer; `check_health`.

What a rank that does not answer is doing, as far as can be told from outside.

Guarantees: nothing is asked of its main loop: what counts is its own page, what the kernel shows,
and whether it gives a sign of life beside that loop. That tells one that waits, whose interpreter
runs, from one that is wedged, in which native code keeps everything else from running. It costs
nothing until somebody asks.

Left to others: when a rank is taken for hung and ended (`watch`).

Whether every rank's main loop answers, and what those are doing that do not.

Guarantees: whoever answers in time is not looked at; those that do not are asked for a sign of life
beside their main loops, and diagnosed, before anything is raised.

Left to others: what the signs mean (`health`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Shape
from phalanx.actors.spec.results import OutcomeKind
from phalanx.actors.spec.validate import check_seconds
from phalanx.runtime import Vitals
from phalanx.supervision import CallTimeout, Unhealthy

from .heartbeat import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping
    from concurrent.futures import Future

    from phalanx.actors.calls.rank import Running
    from phalanx.actors.group.handle import Shared
    from phalanx.actors.spec.results import RankInfo

    from .heartbeat import Sign


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
