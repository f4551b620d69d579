"""`Executor.check_health`: checks that every rank's main loop replies; classifies silent ranks.

The state of a silent rank comes from its progress page, from /proc, and from a heartbeat beside its
main loop: a rank that waits replies to that; a wedged one, in which native code holds the
interpreter lock, does not.
"""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Shape
from phalanx.actors.spec.results import OutcomeKind
from phalanx.runtime import Pulse, Vitals
from phalanx.supervision import CallTimeout, Unhealthy, check_seconds

from .heartbeat import HEARTBEAT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    from phalanx.actors.calls.rank import Progress
    from phalanx.actors.group.handle import Group
    from phalanx.runtime import RankInfo


_HEARTBEAT_TICKS = 2  # clock ticks that the reply to a heartbeat may have used


def check_health(group: Group, timeout: float) -> None:
    """See `Executor.check_health`."""
    group.callbacks.check_may_wait("check_health")
    health, clock = group.actor.health, group.clock
    deadline = clock() + check_seconds("timeout", timeout)
    reserved = min(HEARTBEAT_TIMEOUT, timeout / 2)  # of it is kept for the heartbeats
    incarnations = {info.rank: info.incarnation for info in group.view.ranks}
    ping = [((), dict[str, Any]())]
    future = group.call(
        Shape.GATHER, _ping, ping, timeout=timeout, retries=0, non_block=True, at_once=True
    )
    vitals: dict[int, Vitals] = {}
    replies: dict[int, Pulse | None] = {}
    late, gone = set(incarnations), set[int]()
    with suppress(TimeoutError):
        future.exception(max(0.0, deadline - reserved - clock()))
    if future.done():
        late, gone = _silent(future, incarnations)
    if late:  # so far, or because this thread woke up long after the deadline
        vitals = {rank: health.vitals(rank, each) for rank, each in incarnations.items()}
        complete = threading.Event()
        with closing(group.heartbeats.request(incarnations, complete.set)) as request:
            late, gone = _silent(future, incarnations)  # which ends at the call's own deadline
            if late:
                complete.wait(HEARTBEAT_TIMEOUT - reserved)
            replies = dict(request.replies)
    if not late and not gone:
        return
    group.check_open()
    silent = sorted(late | gone)
    infos = {info.rank: info for info in group.view.ranks}
    gone |= {rank for rank, info in infos.items() if incarnations.get(rank) != info.incarnation}
    running = {each.rank: each for each in group.plane.running()}
    states: dict[int, str] = {}
    details: dict[int, str] = {}
    for rank in silent:
        info = infos.get(rank)
        states[rank], detail = _diagnose(
            info,
            running.get(rank),
            vitals.get(rank, Vitals()),
            replies.get(rank),
            clock(),
            vitals=Vitals() if info is None else health.vitals(rank, info.incarnation),
            is_silent=rank in replies and replies[rank] is None,
            is_gone=rank in gone,
        )
        details[rank] = f"{states[rank]} ({detail})" if detail else states[rank]
    raise Unhealthy("check_health", silent, timeout, states, details)


def _silent(future: Future[Any], ranks: Iterable[int]) -> tuple[set[int], set[int]]:
    """Return which of *ranks* have not replied in time, and which died before they could."""
    try:
        outcomes = future.result()
    except CallTimeout:  # it was not sent: the group is not whole
        return set(ranks), set()
    late = {each.rank for each in outcomes if each.kind not in (OutcomeKind.OK, OutcomeKind.DEAD)}
    return late, {each.rank for each in outcomes if each.kind is OutcomeKind.DEAD}


def _ping(_worker: object) -> None:
    """Reply, from the main loop."""


def _diagnose(
    info: RankInfo | None,
    running: Progress | None,
    before: Vitals,
    pulse: Pulse | None,
    now: float,
    *,
    vitals: Vitals,
    is_silent: bool,
    is_gone: bool,
) -> tuple[str, str]:
    """Return the state of one silent rank, one of those of `Unhealthy`, and the details.

    Args:
        before: Vitals from before the heartbeat was requested.
        pulse: Its heartbeat; None if it has not replied, or got no request.
        vitals: Those of now.
        is_silent: Whether it got a request, and has not replied.
        is_gone: Whether the incarnation that was silent has died.
    """
    if info is None or not vitals.state:
        return "dead", ""
    if info.state == "starting":
        return ("stopped" if vitals.state == "T" else "starting"), ""
    if is_gone:
        return "dead", ""
    if vitals.state == "T":
        return "stopped", ""
    if info.state == "stopping":
        return "dead", "being stopped"
    age = 0.0 if running is None else now - running.began
    if running is None or not (running.began or running.method):
        where = "has begun no call"
    elif not running.began:
        where = f"in {running.method}, until its items are taken"
    else:
        where = f"in {running.method} for {age:.1f} s" if running.method else f"for {age:.1f} s"
    if pulse is not None and pulse.where:
        where += f", at {pulse}"
    if running is not None and running.limit is not None and age >= running.limit:
        return "hung", where
    used = vitals.ticks - before.ticks
    if used > _HEARTBEAT_TICKS or (used and vitals.state == "R"):
        return "busy", f"{where}, holds the interpreter lock" if is_silent else where
    place = f", in {vitals.wait}" if vitals.wait else ""
    if is_silent and vitals.state == "D":
        return "wedged", f"{where}, uninterruptible{place}"
    if is_silent:
        return "wedged", f"{where}, native code holds the interpreter lock{place}"
    return "waiting", f"{where}{place}"
