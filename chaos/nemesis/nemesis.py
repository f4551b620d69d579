"""The nemesis: injects the faults of a schedule into real processes.

Guarantees: a fault is recorded before it is injected; a stopped process continues, and a cut
network is restored, at the end of the run at the latest; a fault whose injection point did
not come is reported as missed.

Workers inject the faults of `worker_faults`, in their next call or start.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol

from phalanx.runtime import process_tree, procfs
from phalanx.supervision import Phase

from .catalog import FAULTS, HELPERS, NodeNetwork, is_rank
from .processes import TargetProcess, freeze_node, helpers_of, kill_node, labelled, tasks_of_node
from .worker_faults import ANY_RANK, Orders, is_by_worker, withdraw

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phalanx.actors import ExecutorSpec
    from phalanx.actors import Group as RankGroup
    from phalanx.chaos.history.events import Ranks
    from phalanx.chaos.history.journal import Journal
    from phalanx.runtime import NodeInfo

    from .schedule import ScheduledFault

_SERVING = ("up", "suspect")  # states of a node that may have ranks
_DELAYS = {  # seconds on the way to a node, and from it
    "cut": (math.inf, math.inf),
    "cut_in": (math.inf, 0.0),
    "cut_out": (0.0, math.inf),
    "delay": (0.5, 0.5),
}
_ALIVE = (Phase.STARTING, Phase.SERVING, Phase.MENDING, Phase.WAITING)


class Group(Protocol):
    """The part of a group that the nemesis uses: the `GroupProbe` of the run."""

    name: str
    spec: ExecutorSpec
    shared: RankGroup


class Nemesis:
    """The faults of one driver.

    Args:
        folder: Of the run.
        groups: Returns those that were built, oldest first.
        look: Called before a worker dies: its children have another parent afterwards.
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        groups: Callable[[], list[Group]],
        look: Callable[[], None],
    ) -> None:
        self._journal, self._groups, self._look = journal, groups, look
        self._before = {helper.pid for helper in helpers_of(os.getpid())}
        self._lock = threading.RLock()
        self._waiting: list[ScheduledFault] = []  # for an injection point in the driver
        self._forced: set[int] = set()  # those for which a restart was forced
        self._orders = Orders(folder)
        self._ordered: list[tuple[ScheduledFault, list[Path]]] = []  # of workers
        self._ends: list[Callable[[], object]] = []  # of what lasts
        self._over = False

    # --- the schedule -------------------------------------------------------------------

    def inject(self, fault: ScheduledFault) -> None:
        """Inject *fault* now, or at its injection point."""
        found = self._victim(fault)
        if found is None:
            self._miss(fault, "no group was alive")
            return
        group, rank = found
        if rank >= (size := len(group.shared.view.ranks)):
            self._miss(fault, f"there is no rank {rank} in a group of {size}")
            return
        ranks = tuple(range(size)) if fault.target == "group" else (rank,)
        if FAULTS[fault.fault].how == "node":
            self._hit_nodes(fault, group, ranks)
            return
        with self._lock:
            if is_by_worker(fault):
                self._order(fault, group, ranks)
                if FAULTS[fault.fault].how == "start":
                    self._force_restart(fault, group, rank)
                return
            if fault.point:
                self._waiting.append(fault)
                self.force_restarts()
                return
        self._signal(fault, group, ranks)  # without the lock: it may end this process in good order

    def force_restarts(self) -> None:
        """Kill a rank of a group that serves, for each fault that waits for a restart."""
        for fault in [] if self._over else list(self._waiting):
            if fault.point != "restarting" or fault.number in self._forced:
                continue
            found = self._victim(fault)
            if found is not None and found[0].shared.view.phase is Phase.SERVING:
                self._forced.add(fault.number)
                self._force_restart(fault, *found)

    def stop(self) -> None:
        """Resume what is stopped, and inject nothing more, except at ``closing``."""
        self._over = True
        with self._lock:
            # Hangs that no worker has begun would add up long after the end.
            for fault, orders in self._ordered:
                withdrawn = [withdraw(order) for order in orders]
                if all(withdrawn):
                    self._miss(fault, "the run was over before a worker came to it")
                elif fault.fault == "stop":
                    self._ends.append(self._continue_ranks)
            self._ordered = []
        while self._ends:  # after an interrupt, `close` goes on with those that are left
            end = self._ends[-1]
            end()
            self._ends.remove(end)

    def _continue_ranks(self) -> None:
        """Continue every rank that has stopped itself."""
        for group in self._groups():
            for info in group.shared.view.ranks:
                if (process := process_of(group, info.rank)) is not None:
                    process.send(signal.SIGCONT)

    def close(self) -> None:
        """Stop, and report what was missed."""
        self.stop()
        with self._lock:
            missed, self._waiting = self._waiting, []
        for fault in missed:
            self._miss(fault, "its injection point did not come")

    # --- the injection points -----------------------------------------------------------

    def reached(self, point: str, group: Group, ranks: Ranks) -> None:
        """Inject what waits for *point*, which these (rank, incarnation) pass."""
        if not self._waiting or (self._over and point != "closing"):
            return
        among = tuple(rank for rank, _ in ranks)
        with self._lock:
            here = [
                fault
                for fault in self._waiting
                if fault.point == point
                and (not is_rank(fault.target) or int(fault.target) in among)
            ]
            here = here if point == "closing" else here[:1]  # closing comes once, and takes all
            self._waiting = [fault for fault in self._waiting if fault not in here]
        for fault in here:
            victims = among
            if is_rank(fault.target):
                victims = (int(fault.target),)
            elif fault.target != "group" and among:
                victims = (among[int(fault.draw * len(among))],)
            self._signal(fault, group, victims)

    # --- injection ----------------------------------------------------------------------

    def _victim(self, fault: ScheduledFault) -> tuple[Group, int] | None:
        """Return a rank of a group that is alive; preferably one that has a process."""
        alive = [group for group in self._groups() if group.shared.view.phase in _ALIVE]
        ranks = [(group, info) for group in alive for info in group.shared.view.ranks]
        if not ranks:
            return None
        if is_rank(fault.target):
            return alive[-1], int(fault.target)
        first = int(fault.draw * len(ranks))
        ordered = [*ranks[first:], *ranks[:first]]
        group, info = next((each for each in ordered if each[1].pid is not None), ordered[0])
        return group, info.rank

    def _order(self, fault: ScheduledFault, group: Group, ranks: tuple[int, ...]) -> None:
        driver = TargetProcess.of(os.getpid()) if fault.target == "driver" else None
        to = ranks if driver is None else (ANY_RANK,)
        orders = [self._orders.give(fault, group.name, rank, driver) for rank in to]
        self._ordered.append((fault, orders))

    def _force_restart(self, fault: ScheduledFault, group: Group, rank: int) -> None:
        process = process_of(group, rank)
        if process is not None:  # otherwise it is starting already
            self._record(fault, group, process, lethal=True, note="killed, to force a restart")
            process.inject("kill")

    def _signal(self, fault: ScheduledFault, group: Group, ranks: tuple[int, ...]) -> None:
        if fault.target == "driver":
            driver = TargetProcess.of(os.getpid())
            self._record(fault, group, driver)
            driver.inject(fault.fault, fault.seconds)
            return
        if fault.target in HELPERS:
            found, missing = self._helper(fault, group), f"there was no {fault.target} process"
        else:
            found = [each for rank in ranks if (each := process_of(group, rank)) is not None]
            missing = f"rank {', '.join(map(str, ranks))} had no process"
        if not found:
            self._miss(fault, missing)
        for process in found:
            self._record(fault, group, process)
            end = process.inject(fault.fault, fault.seconds)
            if fault.fault == "stop":
                with self._lock:
                    self._ends.append(end)

    def _hit_nodes(self, fault: ScheduledFault, group: Group, ranks: tuple[int, ...]) -> None:
        nodes = group.shared.nodes()
        serving = [node for node in nodes if node.state in _SERVING and node.place]
        found = [node for node in serving if not set(ranks).isdisjoint(node.ranks)]
        if fault.target == "spare":
            spares = [node for node in serving if not node.ranks]
            found = spares[int(fault.draw * len(spares)) :][:1]
        if not found:
            self._miss(fault, "there was no such node that served")
        # One that is about to start has no process there: it may start elsewhere, in good health.
        infos = [info for info in group.shared.view.ranks if info.pid is not None]
        incarnations: dict[int | None, int] = {info.rank: info.incarnation for info in infos}
        for node in found:
            inject = _prepared(fault, node, group.spec.cluster)
            if isinstance(inject, str):
                self._miss(fault, inject)
                continue
            self._look()
            what = {"group": group.name, "node": node.node, "seconds": fault.seconds or None}
            for rank in node.ranks or (None,):
                who = {"rank": rank, "incarnation": incarnations.get(rank)}
                self._journal.write(fault.injected(**who, **what))
            if (end := inject()) is not None:
                with self._lock:
                    self._ends.append(end)

    def _helper(self, fault: ScheduledFault, group: Group) -> list[TargetProcess]:
        every = [each for each in helpers_of(os.getpid()) if each.role == fault.target]
        if fault.target in ("standby", "store"):
            name = process_tree.clean_label(f"{group.spec.name}/")
            every = [each for each in every if each.label.startswith(name)]
        # The helpers of a runtime that existed before the run come last.
        found = [each for each in every if each.pid not in self._before] or every
        index = int(fault.draw * len(found))
        return found[index : index + 1]

    def _record(
        self, fault: ScheduledFault, group: Group, process: TargetProcess, **more: object
    ) -> None:
        self._look()
        rank, incarnation = process.rank
        who = {"rank": rank, "incarnation": incarnation, "pid": process.pid}
        self._journal.write(fault.injected(group=group.name, **who, **more))

    def _miss(self, fault: ScheduledFault, why: str) -> None:
        self._journal.write(fault.missed(why))


def _prepared(
    fault: ScheduledFault, node: NodeInfo, cluster: object
) -> Callable[[], Callable[[], object] | None] | str:
    """Return what injects *fault* into *node*, and returns what ends it; or why it cannot be."""
    if refusal := FAULTS[fault.fault].refusal_of(cluster):
        return refusal.remedy
    if isinstance(cluster, NodeNetwork) and fault.fault in _DELAYS:
        return partial(_disturb, cluster, node.node, fault)
    tasks = tasks_of_node(node.place)
    starter = procfs.read(tasks[0].parent) if tasks else None
    if starter is None:
        return "no process of the node is on this machine"
    if fault.fault == "node":
        return partial(kill_node, node.place)
    if fault.fault == "freeze":
        return partial(freeze_node, node.place, fault.seconds)
    if starter.pid in (1, *procfs.ancestors(os.getpid())):  # those adopt what has lost its parent
        return "the driver itself has started the node"
    return partial(TargetProcess(*starter.key).inject, "kill")


def _disturb(network: NodeNetwork, node: int, fault: ScheduledFault) -> Callable[[], None]:
    heal = network.disturb(node, *_DELAYS[fault.fault])
    is_over = threading.Event()

    def heal_in_time() -> None:
        try:
            is_over.wait(fault.seconds)
        finally:
            heal()

    def end() -> None:
        is_over.set()
        thread.join()

    thread = threading.Thread(target=heal_in_time, name="chaos-heal", daemon=True)
    thread.start()
    return end


def process_of(group: Group, rank: int) -> TargetProcess | None:
    """Return the process of *rank*, if it has one: our child, not yet collected, or a node's."""
    for info in group.shared.view.ranks:
        if info.rank == rank and info.pid is not None:
            task = procfs.read(info.pid)
            if task is not None and (task.parent != os.getpid() or task.is_dead):
                task = None
            label = process_tree.clean_label(f"{group.spec.name}/{rank}#{info.incarnation}")
            for node in group.shared.nodes():  # the number of the process may be of its namespace
                if rank in node.ranks and node.place:
                    started = labelled(tasks_of_node(node.place))
                    task = next((each for each, _, name in started if name == label), None)
            if task is not None:
                return TargetProcess(*task.key, rank=(rank, info.incarnation))
    return None


def kill_ranks(groups: list[Group], *, starting: bool = False) -> None:
    """Kill the ranks of *groups*, or only those that are *starting*."""
    for group in groups:
        for info in group.shared.view.ranks:
            process = process_of(group, info.rank)
            if process is not None and (not starting or info.state == "starting"):
                process.inject("kill")
