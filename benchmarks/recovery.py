"""``python -m benchmarks recovery``: seconds from SIGKILL of a rank to the next answer.

Guarantees: a bare process and every kind of group lose one process in each round, in an order that
changes, so that drift of the machine falls on all alike. Where a rank is idle when it is killed,
the next call is made at once, with retries, and its return stops the clock.

Left to others: the peers (`recovery_peers`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx import Executor, Intensity, RestartPolicy, Runtime, Strategy, WorkerActor
from phalanx.errors import WorkerDied
from phalanx.events import WorkerExited

from .harness.arguments import add_json, add_peer_env, check_writable, count, give
from .harness.machine import describe, sentence
from .harness.pidfd_baseline import Bare
from .harness.stats import Samples, of
from .harness.tables import seconds, table, time_with_interval, verdict_table
from .harness.targets import Verdict, at_most
from .harness.venvs import Environments
from .recovery_peers import measure_peers, peers_text

if TYPE_CHECKING:
    import argparse

    from phalanx import WorkerContext

_LONG = 60.0
_MANY = Intensity(1_000_000, 1.0)
_KNOWN, _FAILED, _CALLED = "known", "failed", "called"


class Plain(WorkerActor):
    """A rank without a process group."""

    def ping(self) -> int:
        """Answer."""
        return self.ctx.rank

    def hold(self, victim: int) -> None:
        """Return at once, but for *victim*, which is at work until it is killed."""
        if self.ctx.rank == victim:
            time.sleep(_LONG)


class Reducer(WorkerActor):
    """A rank in a gloo group."""

    def on_start(self, ctx: WorkerContext) -> None:
        """Join the group."""
        ctx.init_process_group("gloo", timeout=60)

    def on_reform(self, ctx: WorkerContext) -> None:
        """Join the next one."""
        ctx.init_process_group("gloo", timeout=60)

    def ping(self) -> float:
        """Add up a one of each rank."""
        # In the ranks only; by name, for torch's types are partly unknown.
        one: Any = import_module("torch").ones(1)
        import_module("torch.distributed").all_reduce(one)
        return float(one)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of group, and what it is to reach.

    Attributes:
        target: Seconds until the first call, at most; None sets none.
        in_flight: Whether ranks are killed at work, and the call of it fails.
    """

    name: str
    worker: type[WorkerActor]
    options: dict[str, Any]
    target: float | None = None
    in_flight: bool = False


def _kinds(ranks: int) -> list[Kind]:
    alone = {"strategy": Strategy.ONE_FOR_ONE}
    group = {"strategy": Strategy.ONE_FOR_ALL}
    keep = {**group, "policy": RestartPolicy(survivors="keep")}
    return [
        Kind("at work", Plain, alone, in_flight=True),
        Kind("no process group", Plain, alone, 0.3),
        Kind("no process group, a spare", Plain, {**alone, "standby": 1}, 0.05),
        Kind("gloo, survivors kept", Reducer, keep, 0.5),
        Kind("gloo, survivors kept, a spare", Reducer, {**keep, "standby": 1}),
        Kind("gloo, all restarted", Reducer, group, 1.5),
        Kind("gloo, all restarted from spares", Reducer, {**group, "standby": ranks}),
    ]


@dataclass(slots=True)
class Found:
    """What a run found, in seconds: by kind of group and what was waited for, one per kill."""

    machine: dict[str, Any]
    ranks: int
    kills: int
    bare: list[float] = field(default_factory=list[float])
    times: dict[tuple[str, str], list[float]] = field(
        default_factory=dict[tuple[str, str], list[float]]
    )

    def series(self, kind: str, what: str) -> Samples | None:
        """Return one figure for each kill."""
        return of(self.times.get((kind, what), []))


class Group:
    """A group whose ranks are killed one after the other."""

    _listening: ClassVar[float] = _LONG

    def __init__(self, kind: Kind, ranks: int, runtime: Runtime) -> None:
        self.kind = kind
        self.executor: Executor[Any] = Executor(
            kind.worker, ranks, intensity=_MANY, runtime=runtime, **kind.options
        )

    def wait_whole(self) -> None:
        """Return when all ranks serve and all spares are warm."""
        deadline = time.monotonic() + _LONG
        while self.executor.status().standby < self.kind.options.get("standby", 0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.kind.name}: its spares are not warm in {_LONG:g} s")
            time.sleep(0.005)  # there is no event for a warm spare
        self.executor.collective_rpc("ping", _LONG)

    def kill(self, rank: int) -> dict[str, float]:
        """Kill *rank*; return the seconds until each thing that is waited for."""
        exits: list[float] = []
        known = threading.Event()
        pid = self.executor.ranks[rank].pid
        assert pid is not None

        def on_event(event: Any) -> None:
            if isinstance(event, WorkerExited) and event.pid == pid:
                exits.append(event.at)
                known.set()

        forget = self.executor.subscribe(on_event)
        try:
            found = self._kill_at_work(rank, pid) if self.kind.in_flight else self._kill(pid)
            known.wait(self._listening)
        finally:
            forget()
        began = found.pop("began")
        return {_KNOWN: exits[0] - began, **found}

    def _kill(self, pid: int) -> dict[str, float]:
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.executor.collective_rpc("ping", _LONG, retries=10)
        return {"began": began, _CALLED: time.monotonic() - began}

    def _kill_at_work(self, rank: int, pid: int) -> dict[str, float]:
        moment: list[float] = []

        def strike() -> None:
            moment.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(0.05, strike)
        timer.start()
        try:
            self.executor.collective_rpc("hold", _LONG, args=(rank,), retries=0)
        except WorkerDied:
            failed = time.monotonic()
        else:
            message = f"rank {rank} answered, and was to die"
            raise AssertionError(message)
        finally:
            timer.join()
        return {"began": moment[0], _FAILED: failed - moment[0]}


def measure(ranks: int, kills: int) -> Found:
    """Kill *kills* ranks of each kind of group of *ranks*, and as many bare processes."""
    found = Found(describe(), ranks, kills)
    with ExitStack() as stack:
        runtime = stack.enter_context(Runtime(console=None, stream=False))
        bare = stack.enter_context(Bare())
        groups = [Group(kind, ranks, runtime) for kind in _kinds(ranks)]
        for group in groups:
            stack.enter_context(group.executor)
        for number in range(kills):
            print(f"kill {number + 1} of {kills}", file=sys.stderr, flush=True)
            shift = number % len(groups)
            for group in groups[shift:] + groups[:shift]:
                for each in groups:  # one group's mending is not to slow the next
                    each.wait_whole()
                for what, took in group.kill(number % ranks).items():
                    found.times.setdefault((group.kind.name, what), []).append(took)
            for each in groups:
                each.wait_whole()
            found.bare.append(bare.kill())
    return found


def verdicts(found: Found) -> list[Verdict]:
    """Hold what was found against its targets."""
    bare = of(found.bare)
    known = found.series("no process group", _KNOWN)
    failed, struck = (found.series("at work", what) for what in (_FAILED, _KNOWN))
    ratio = known.over(bare) if known and bare else None
    after = failed.with_each(struck, lambda one, two: one - two) if failed and struck else None
    return [
        at_most("the driver knows: at most 1.5 of a bare pidfd", ratio, 1.5),
        at_most("the call in flight has failed: at most 10 ms after that", after, 0.010),
        *(
            at_most(
                f"first call, {kind.name}: at most {seconds(kind.target)}",
                found.series(kind.name, _CALLED),
                kind.target,
            )
            for kind in _kinds(found.ranks)
            if kind.target is not None
        ),
    ]


def text(found: Found) -> str:
    """Return what was found as tables."""
    rows = [("the news of it, a bare pidfd", of(found.bare))]
    rows.append(("the driver knows", found.series("no process group", _KNOWN)))
    rows.append(("the driver knows, the rank at work", found.series("at work", _KNOWN)))
    rows.append(("the call in flight has failed", found.series("at work", _FAILED)))
    for kind in _kinds(found.ranks):
        if not kind.in_flight:
            what = "first call" if kind.worker is Plain else "first all-reduce"
            rows.append((f"{what}, {kind.name}", found.series(kind.name, _CALLED)))
    lines = [
        (name, time_with_interval(samples), seconds(max(samples.values)))
        for name, samples in rows
        if samples is not None
    ]
    about = (
        f"## Recovery\n\n{sentence(found.machine)}.\n\n{found.ranks} ranks with torch imported, "
        f"{found.kills} kills of each kind; medians with their interval "
        f"({Samples(tuple(found.bare)).confidence:.1%} confidence)."
    )
    shown = table(("from SIGKILL to", "median", "slowest"), lines)
    return f"{about}\n\n{shown}\n\n### Targets\n\n{verdict_table(verdicts(found))}"


def values(found: Found) -> dict[str, Any]:
    """Return what was found in types that JSON knows, in seconds."""
    return {
        "machine": found.machine,
        "ranks": found.ranks,
        "kills": found.kills,
        "bare_pidfd": found.bare,
        "times": [
            {"group": kind, "until": what, "seconds": times}
            for (kind, what), times in found.times.items()
        ],
        "targets": [asdict(verdict) for verdict in verdicts(found)],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--kills", type=count, default=30, help="of each kind (30)")
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--peers", action="store_true", help="Ray, xoscar and torchrun as well")
    parser.add_argument("--peer-kills", type=count, default=5, help="kills of each peer (5)")
    add_peer_env(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; with Ctrl-C, the peers that there were by then."""
    check_writable("json", arguments.json)
    environments = Environments(arguments.peer_env)
    found = measure(arguments.ranks, arguments.kills)
    figures, shown, code = values(found), text(found), 0
    if arguments.peers:
        fates, code = measure_peers(arguments.ranks, arguments.peer_kills, environments)
        figures["peers"] = [fate.values() for fate in fates]
        shown += f"\n\n{peers_text(fates)}"
    give(arguments, figures, shown)
    return code
