"""The catalogue of faults: the effect, targets and injection points of each.

Unknown faults, targets and points are refused by name before anything starts.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from phalanx.actors import POINTS
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
"""The faults that are signals."""

HELPERS = ("standby", "zygote", "guardian", "store", "logs")
"""The targets that are helper processes of the driver."""

TARGETS = ("random", "group", *HELPERS, "spare", "driver")
"""The targets by name; the number of a rank is a target as well.

A fault of a node hits the node of a rank, those of all ranks, or one without ranks (``spare``).
"""

WORKER_POINTS = ("running", "after_reply")
"""The injection points that only workers pass."""


@runtime_checkable
class NodeNetwork(Protocol):
    """Options of a cluster that can disturb its network, for the faults `cut` and `delay`."""

    def disturb(self, node: int, inward: float, outward: float) -> Callable[[], object]:
        """Disturb the network between the driver and a node; return what ends that.

        Args:
            node: Its number, as in `Status.nodes`.
            inward: Seconds by which what is sent to the node is delayed; ``math.inf``: it is lost.
            outward: Likewise for what the node sends.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault.

    Attributes:
        about: Its effect.
        how: By ``signal``, within a ``call`` of a worker, in the ``start`` of one, to
            a ``node`` of a cluster.
        targets: What it can be done to, beside one rank.
        points: The injection points that it can have.
        lethal: Whether it ends its victim by itself.
        seconds: How long it lasts by default; 0.0 if it does not last.
        needs: ``gpu``, ``cluster``, ``network`` (a cluster with a `NodeNetwork`) or nothing.
    """

    name: str
    about: str
    how: Literal["signal", "call", "start", "node"]
    targets: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    lethal: bool = False
    seconds: float = 0.0
    needs: str = ""

    def refusal(self, target: str | None, point: str | None) -> SpecError | None:
        """Return why it cannot be injected into *target* at *point*; None if it can."""
        if target not in (None, "random", *self.targets) and not is_rank(target):
            can = ", ".join(("random", "a rank", *self.targets))
            remedy = f"{self.name} ({self.about}) can be done to {can}"
            if target not in TARGETS:
                known = ", ".join(TARGETS)
                remedy = f"unknown target; give one of {known}, or the number of a rank"
            return SpecError("target", target, remedy)
        if point and point not in self.points_of(target):
            known = ", ".join(self.points_of(target) if point in POINTS else POINTS)
            remedy = f"not a point for {self.name}: give one of {known}" if known else "has none"
            return SpecError("point", point, remedy)
        return None

    def refusal_of(self, cluster: object) -> SpecError | None:
        """Return why it cannot be injected into a group with these options of a cluster."""
        if self.needs == "cluster" and cluster is None:
            return SpecError("faults", self.name, "is done to a node: give a target with cluster=")
        if self.needs == "network" and not isinstance(cluster, NodeNetwork):
            remedy = "needs options of cluster= that can disturb the network: see NodeNetwork"
            return SpecError("faults", self.name, remedy)
        return None

    def points_of(self, target: str | None) -> tuple[str, ...]:
        """Return the injection points that it can have with *target*."""
        if target in HELPERS:
            return tuple(point for point in self.points if point not in WORKER_POINTS)
        return self.points


_signal = partial(Fault, how="signal", targets=("group", *HELPERS, "driver"), points=POINTS)
_call = partial(Fault, how="call", targets=("group",), points=WORKER_POINTS)
_gpu = partial(Fault, how="call", points=("running",), needs="gpu")
_node = partial(Fault, how="node", targets=("group", "spare"), needs="cluster")
_cut = partial(_node, needs="network", seconds=2.5)

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        _signal("kill", "SIGKILL", lethal=True),
        _signal("term", "SIGTERM", lethal=True),
        _signal("stop", "SIGSTOP, and SIGCONT later", seconds=2.0),
        _call("segv", "a read from address 0: SIGSEGV", lethal=True),
        _call("exit", "os._exit(57) in a call", lethal=True),
        _call("raise", "an exception in place of the result", points=("running",)),
        Fault("raise_before", "an exception before the method", "call", (), ("running",)),
        _call("hang", "a loop in Python", seconds=20.0),
        _call("memory", "allocation up to a limit (RLIMIT_AS)", points=("running",)),
        _call("slow", "half a second more for a call", seconds=0.5),
        Fault("start_raise", "an exception in the next start of a rank", "start"),
        _call("grandchild", "a process in a session of its own, which is not waited for"),
        _gpu("cuda_error", "a kernel that fails, after which the process cannot use its GPU"),
        _gpu("cuda_oom", "an allocation larger than the memory of the GPU"),
        _node("node", "SIGKILL of all processes of a node", lethal=True),
        _node("agent", "SIGKILL of the process that has started a node", lethal=True),
        _node("freeze", "SIGSTOP of all processes of a node, and SIGCONT later", seconds=2.5),
        _cut("cut", "nothing passes between the driver and a node"),
        _cut("cut_in", "nothing reaches a node"),
        _cut("cut_out", "nothing that a node sends arrives"),
        _cut("delay", "half a second more to a node, and from it"),
    )
}
"""Every fault by name."""


@dataclass(frozen=True, slots=True)
class FaultPattern:
    """Faults to draw: one kind, with any target or one, at any time or at one injection point."""

    fault: str
    target: str | None = None
    point: str | None = None

    def __post_init__(self) -> None:
        if refusal := fault_named("faults", self.fault).refusal(self.target, self.point):
            raise refusal

    @classmethod
    def of(cls, text: str) -> FaultPattern:
        """Return the pattern ``fault``, ``fault:target``, ``fault@point``, ``fault:target@point``.

        Raises:
            SpecError: *text* is none.
        """
        head, at, point = text.partition("@")
        fault, colon, target = head.partition(":")
        return cls(fault.strip(), target.strip() if colon else None, point.strip() if at else None)

    def targets_among(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return its target, or those of *targets* that it can have.

        Raises:
            SpecError: there is none.
        """
        if self.target is not None:
            return (self.target,)
        if not targets:
            raise SpecError("targets", targets, f"name at least one of {', '.join(TARGETS)}")
        refusals = {target: FAULTS[self.fault].refusal(target, self.point) for target in targets}
        can = tuple(target for target in targets if refusals[target] is None)
        if not can and (refusal := refusals[targets[0]]):
            raise refusal
        return can


def fault_named(field: str, name: Any) -> Fault:
    """Return the fault called *name*.

    Raises:
        SpecError: there is none; it names *field*.
    """
    fault = FAULTS.get(name) if isinstance(name, str) else None
    if fault is None:
        raise SpecError(field, name, f"unknown fault; give one of {', '.join(FAULTS)}")
    return fault


def is_rank(target: object) -> bool:
    """Whether *target* is the number of a rank."""
    return isinstance(target, str) and target.isascii() and target.isdigit()
