"""The parts of a run: what is done to groups on nodes, and measured. Each leaves nothing behind.

A group loses nodes again and again; a round begins when all nodes are up and all ranks serve.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tests.support.call_books import Booked, Books, Caller
from tests.support.ray_cluster import RayCluster

from benchmarks.harness.process_group import Family
from benchmarks.harness.stats import percentile
from benchmarks.harness.subprocess_driver import ContestantBroke
from phalanx import Launch, Ray, Runtime, Strategy
from phalanx.cluster import NodeFenced, NodeLost, NodeRecovered
from phalanx.events import WorkerExited

from .peers import called, peer_turn
from .site import LONG, TIMEOUT, Site, kill, tree
from .table import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.harness.venvs import Environments

    from .machines import Machines
    from .table import Found

_SHARES = (0.3, 0.9)
_CALLERS = 8
_TURN = 0.3  # seconds of calls of one size
_FEW = 10  # rounds, at most, of what takes several seconds each
_AGENTS = 6  # rounds, at most, each of which may cost Ray a node for ten minutes
_RAYLETS = 3  # rounds, at most, each of which costs Ray a node


@dataclass(frozen=True, slots=True)
class Lab:
    """What the parts of a run are given; *rounds*, *cuts* and *calls* are those to make."""

    machines: Machines
    found: Found
    runtime: Runtime
    folder: Path
    environments: Environments | None  # None leaves peers out
    rounds: int
    cuts: int
    calls: int

    def site(self, ranks: int, per_node: int, spares: int = 0, **given: Any) -> Site:
        """Return a group on nodes."""
        given = {"runtime": self.runtime, **given}
        return Site(self.machines, ranks, per_node, spares, **given)

    def count(self, what: str, most: int = _FEW) -> Iterator[int]:
        """Count rounds, *most* at most, and say so on stderr."""
        return _count(what, min(most, self.rounds))


def _count(what: str, most: int) -> Iterator[int]:
    for number in range(most):
        print(f"{what}: {number + 1} of {most}", file=sys.stderr, flush=True)
        yield number


# --- what is lost ---------------------------------------------------------------------------


def rank(lab: Lab) -> None:
    """Kill ranks of a node that is well; torch is imported, as in `recovery`."""
    with lab.site(4, 4, launch=Launch(preload=("torch",))) as site:
        for number in lab.count("rank killed", lab.rounds):
            site.settle()
            act = partial(kill, site.pid_of(number % 4))
            lab.found.note("rank", site.strike(act, WorkerExited))


def node(lab: Lab) -> None:
    """Kill the process of a node that has a spare beside it."""
    with lab.site(4, 4, spares=1) as site:
        for _ in lab.count("node process killed", lab.rounds):
            site.settle()
            ends = site.processes(site.nodes())
            lab.found.note("node", site.strike(partial(kill, site.above(0)), NodeLost, ends))


def silence(lab: Lab) -> None:
    """Cut a machine off for ever while its ranks are at work; there is a spare."""
    with lab.site(4, 4, spares=1) as site:
        for _ in _count("machine silent", 2 * lab.cuts):
            site.settle()
            ends = site.processes(site.nodes())
            act = partial(site.silence, site.nodes())
            lab.found.note("silence", site.strike(act, NodeLost, ends, at_work=True))


def cuts(lab: Lab) -> None:
    """Cut a machine off for less than ``node_timeout``, and look whether its ranks are kept."""
    with lab.site(4, 4, spares=1) as site:
        for number in _count("short cut", len(_SHARES) * lab.cuts):
            share = _SHARES[number % len(_SHARES)]
            site.settle()
            since = site.mark()
            site.silence(site.nodes())
            time.sleep(share * TIMEOUT)  # what is measured is what this much costs
            site.heal()
            site.wait((NodeRecovered, NodeLost), since)
            time.sleep(share * TIMEOUT)  # a lease that could not be renewed has ended by then
            lost = sum(len(event.ranks) for event, _ in site.events_since(NodeLost, since))
            lab.found.note("cuts", {f"{share}": float(lost)})


def driver(lab: Lab) -> None:
    """Cut the driver off from every node, and wait for the last process on any of them."""
    if lab.machines.why_not:
        lab.found.why["driver"] = f"no machine can be cut off: {lab.machines.why_not}"
        return
    with lab.site(4, 4, spares=1) as site:
        for _ in lab.count("driver's machine silent", lab.rounds):
            site.settle()
            nodes = site.nodes(spares=True)
            act = partial(site.silence, nodes)
            lab.found.note("driver", site.strike(act, NodeLost, site.processes(nodes)))


def eight(lab: Lab) -> None:
    """Lose a node with eight ranks, of a group that is restarted as a whole."""
    with lab.site(8, 8, spares=1, strategy=Strategy.ONE_FOR_ALL) as site:
        for _ in lab.count("node with 8 ranks killed"):
            site.settle()
            before = site.group.status()
            site.strike(partial(kill, site.above(0)), NodeLost)
            after = site.group.status()
            spent = {"restarts": after.restarts - before.restarts}
            lab.found.note("eight", {**spent, "epochs": after.epoch - before.epoch})


def accounts(lab: Lab) -> None:
    """Account for calls of all shapes while node processes are killed and machines cut off."""
    books, over = Books(lab.folder), threading.Event()
    # Their zygote imports what they need.
    given = {"worker": Booked, "launch": Launch(preload=("tests.support.call_books",))}
    with lab.site(4, 2, spares=1, args=(str(lab.folder),), **given) as site:
        site.settle()
        callers = [Caller(site.group, books, number, seed=1) for number in range(_CALLERS)]
        threads = [threading.Thread(target=c.run, args=(over,), daemon=True) for c in callers]
        for each in threads:
            each.start()
        number = 0
        try:
            for number in itertools.count():
                if len(books.entries) >= lab.calls:
                    break
                print(f"{len(books.entries)} of {lab.calls} calls", file=sys.stderr, flush=True)
                since = site.mark()
                if number % 2:
                    site.silence(site.nodes()[number // 2 % 2 :][:1])
                else:
                    kill(site.above(number % 4))  # ranks 0 and 2 are on two nodes
                site.wait(NodeFenced, since)
                site.heal()
                site.settle()
        finally:
            over.set()
            for each in threads:
                each.join(2 * LONG)
        books.sums["hung"] += sum(each.is_alive() for each in threads)
    books.audit()
    for line in books.wrong[:20]:
        print(line, file=sys.stderr)
    sums = books.sums
    lab.found.note("accounts", {"calls": len(books.entries), "nodes": number})
    lab.found.note("accounts", {"lost": sums["lost"] + sums["hung"], "doubled": sums["doubled"]})
    lab.found.note("accounts", {"stale": sums["stale"] + sums["swapped"], "other": sums["other"]})


# --- what it costs --------------------------------------------------------------------------


def calls(lab: Lab) -> None:
    """Call 1 and 4 ranks of one far node; peers have their turns, and are stopped between them."""
    torch: Any = import_module("torch")
    loads = {what: (torch.ones(n, dtype=torch.uint8),) if n else () for what, n in SIZES.items()}
    with lab.site(1, 1) as one, lab.site(4, 4) as four, called(lab) as peers:
        names = ["calls", *peers]
        for number in lab.count("calls", lab.rounds):
            for what, ranks in (("empty", 1), *((what, 4) for what in SIZES)):
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    if name == "calls":
                        call = (one if ranks == 1 else four).group.collective_rpc
                        spent = _turn(partial(call, "ping", LONG, loads[what]))
                    else:
                        try:
                            spent = peer_turn(peers[name], SIZES[what], _TURN, alone=ranks == 1)
                        except ContestantBroke as error:
                            lab.found.why[name] = f"broke: {error.what}"
                            names.remove(name)
                            peers[name].end()
                            continue
                    key = f"{name}.{what}.{ranks}"
                    lab.found.note("", {key: percentile(spent, 50)})
                    lab.found.tails.setdefault(key, []).append(percentile(spent, 99))


def _turn(call: Callable[[], object]) -> list[float]:
    """Return the seconds of each call of a turn, after some that are not counted."""
    spent: list[float] = []
    for least, seconds in ((1, _TURN / 5), (3, _TURN)):
        spent, until = [], time.perf_counter() + seconds
        while len(spent) < least or time.perf_counter() < until:
            began = time.perf_counter()
            call()
            spent.append(time.perf_counter() - began)
    return spent


def start(lab: Lab) -> None:
    """Start two nodes with four ranks each, nothing running before; then look at their memory."""
    for _ in lab.count("start"):
        for preload, method, suffix in (((), "ping", ""), (("torch",), "add_up", ".torch")):
            with Runtime(console=None, stream=False) as runtime:
                launch, began = Launch(preload=preload), time.monotonic()
                with lab.site(8, 4, runtime=runtime, launch=launch) as site:
                    site.group.collective_rpc(method, LONG)
                    lab.found.note("", {f"start{suffix}": time.monotonic() - began})
                    ranks = {site.pid_of(number) for number in range(8)}
                    for each in site.nodes():
                        pids = {task.pid for task in site.processes([each])} - ranks
                        memory = Family(os.getpid(), "").pss(pids)
                        lab.found.note("start", {f"memory{suffix}": memory})


# --- on a Ray of several nodes, side by side on this machine -------------------------------------


def ray(lab: Lab) -> None:
    """Start on Ray, and lose an agent, then a raylet."""
    if find_spec("ray") is None:
        lab.found.why["ray"] = "Ray is not in this environment: use .venv-ray of make test-cluster"
        return
    with closing(RayCluster(lab.folder)) as there:
        os.environ.update(there.environment)
        options = partial(
            Ray, address=there.address, ranks_per_node=4, node_timeout=TIMEOUT, node_wait=LONG
        )
        for name in ("n0", "n1"):
            there.add(name)
        for _ in lab.count("start on Ray"):
            with Runtime(console=None, stream=False) as runtime:
                launch, began = Launch(preload=("torch",)), time.monotonic()
                with lab.site(8, 4, runtime=runtime, launch=launch, options=options()) as site:
                    site.group.collective_rpc("add_up", LONG)
                    lab.found.note("ray", {"start": time.monotonic() - began})
        there.add("n2")
        with lab.site(4, 4, spares=1, options=options(spare_nodes=1)) as site:
            for number in lab.count("agent killed", _AGENTS):
                site.settle()
                agent = site.above(0, 1)
                took = site.strike(partial(kill, agent), NodeLost, tree(agent))
                lab.found.note("ray.agent", took)
                there.add(f"n{number + 3}")  # the second loss in ten minutes puts a machine aside
            for number in lab.count("raylet killed", _RAYLETS):
                site.settle()
                took = site.strike(partial(kill, site.above(0, 2)), NodeLost)
                lab.found.note("ray.raylet", took)
                there.add(f"n{number + 3 + _AGENTS}")
