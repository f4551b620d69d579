"""The faults there are: what each does, to whom, at which moments, and what it needs.

Guarantees: a name that is no fault, a target a fault cannot have, or a moment it cannot be aimed at
is refused here, by name, before anything starts.

Left to others: doing them (`striker` from outside, `orders` within a worker).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.actors import POINTS
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
"""What is sent for the faults that are signals."""

PARTS = ("standby", "group", "zygote", "store", "logs", "driver")
"""The targets that are no single rank."""

TARGETS = ("random", *PARTS)
"""The targets by name; a rank's number is one too."""

WORKERS_POINTS = ("running", "after_reply")
"""The moments that only workers see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault.

    Attributes:
        about: What it does, for people.
        how: ``signal`` from outside; ``inside`` a worker, in a call; ``start`` of a worker;
            ``driver``: something the driver does or has done to it.
        parts: Whom else it can be done to, beside a rank.
        points: The moments it can be aimed at.
        lethal: Whether it ends its victim by itself.
        seconds: How long it lasts unless said otherwise; 0.0 for what does not last.
        recovery: The least time, in seconds, that a group needs to be over it.
        hangs: Whether it lasts until somebody's limit ends it, which comes on top of that.
        needs: ``gpu`` or nothing.
    """

    name: str
    about: str
    how: Literal["signal", "inside", "start", "driver"]
    parts: tuple[str, ...] = ()
    points: tuple[str, ...] = ()
    lethal: bool = False
    seconds: float = 0.0
    recovery: float = 1.0
    hangs: bool = False
    needs: str = ""


def _every(*faults: Fault) -> Mapping[str, Fault]:
    return {fault.name: fault for fault in faults}


FAULTS: Mapping[str, Fault] = _every(
    Fault(name="kill", about="SIGKILL", how="signal", parts=PARTS, points=POINTS, lethal=True),
    Fault(name="term", about="SIGTERM", how="signal", parts=PARTS, points=POINTS, lethal=True),
    Fault(
        name="stop",
        about="SIGSTOP, and SIGCONT later",
        how="signal",
        parts=PARTS,
        points=POINTS,
        seconds=2.0,
        recovery=3.0,
    ),
    Fault(
        name="segv",
        about="a read where nothing is: SIGSEGV",
        how="inside",
        parts=("group",),
        points=WORKERS_POINTS,
        lethal=True,
    ),
    Fault(
        name="exit",
        about="os._exit(57) in a call",
        how="inside",
        parts=("group",),
        points=WORKERS_POINTS,
        lethal=True,
    ),
    Fault(
        name="raise",
        about="an exception in place of a call's answer",
        how="inside",
        parts=("group",),
        points=("running",),
    ),
    Fault(
        name="raise_before",
        about="an exception before a call's method, which others may be waiting for in theirs",
        how="inside",
        points=("running",),
    ),
    Fault(
        name="unpicklable",
        about="the same, with one that cannot be pickled",
        how="inside",
        parts=("group",),
        points=("running",),
    ),
    Fault(
        name="hang",
        about="Python code that gets nowhere",
        how="inside",
        parts=("group",),
        points=WORKERS_POINTS,
        seconds=20.0,
        hangs=True,
    ),
    Fault(
        name="gil",
        about="native code that holds the interpreter",
        how="inside",
        parts=("group",),
        points=WORKERS_POINTS,
        seconds=20.0,
        hangs=True,
    ),
    Fault(
        name="memory",
        about="allocating, under a limit, until there is no more",
        how="inside",
        parts=("group",),
        points=("running",),
    ),
    Fault(
        name="slow",
        about="a rank that takes half a second more for a call",
        how="inside",
        parts=("group",),
        points=WORKERS_POINTS,
        seconds=0.5,
    ),
    Fault(
        name="start_raise",
        about="an exception in the start of the next incarnation",
        how="start",
        recovery=2.0,
    ),
    Fault(
        name="start_hang",
        about="a start of the next incarnation that takes its time",
        how="start",
        seconds=5.0,
        recovery=7.0,
    ),
    Fault(
        name="grandchild",
        about="a process that a worker starts in a session of its own, and forgets",
        how="inside",
        parts=("group",),
        points=WORKERS_POINTS,
    ),
    Fault(
        name="descriptors",
        about="every descriptor of a worker closed",
        how="inside",
        parts=("group",),
        points=WORKERS_POINTS,
        recovery=2.0,
    ),
    Fault(
        name="large",
        about="a call larger than any socket's buffer, and more calls than the queue holds",
        how="driver",
        parts=("group",),
    ),
    Fault(
        name="disk",
        about="the disk that snapshots are kept on is full for a while",
        how="driver",
        seconds=2.0,
    ),
    Fault(
        name="device",
        about="a device of a fake inventory reports a fatal error, and is well again later",
        how="driver",
        seconds=2.0,
    ),
    Fault(
        name="cuda_oom",
        about="allocating on the GPU until there is no more",
        how="inside",
        points=("running",),
        needs="gpu",
    ),
    Fault(
        name="cuda_error",
        about="a kernel that fails, after which the process can use its GPU no more",
        how="inside",
        points=("running",),
        needs="gpu",
        recovery=5.0,
    ),
)
"""Every fault by name."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A fault, and perhaps whom and when it is to strike.

    Attributes:
        target: One of `TARGETS` or a rank's number; None leaves it to the schedule.
        point: One of the points of the runtime; None for any time.
    """

    fault: str
    target: str | None = None
    point: str | None = None

    def __post_init__(self) -> None:
        fault = FAULTS.get(self.fault)
        if fault is None:
            raise SpecError("faults", self.fault, f"no such fault; there is {', '.join(FAULTS)}")
        if self.target is not None:
            check_target(fault, self.target)
        if self.point is not None:
            check_point(fault, self.point)

    @classmethod
    def of(cls, text: str) -> Aim:
        """Return the aim written as ``fault``, ``fault:target``, ``fault@point`` or with both."""
        head, at, point = text.partition("@")
        fault, colon, target = head.partition(":")
        return cls(fault.strip(), target.strip() if colon else None, point.strip() if at else None)

    def targets_among(self, targets: Sequence[str]) -> tuple[str, ...]:
        """Return those of *targets* that it can be done to, or its own.

        Raises:
            SpecError: there is none.
        """
        if self.target is not None:
            return (self.target,)
        fault, point = FAULTS[self.fault], self.point
        can = [each for each in targets if each not in PARTS or each in fault.parts]
        can = [each for each in can if point is None or point in fault.points]
        if not can:
            if not targets:
                raise SpecError("targets", targets, f"name at least one of {', '.join(TARGETS)}")
            check_target(fault, targets[0])
            check_point(fault, point or "")
        return tuple(can)

    def __str__(self) -> str:
        target = "" if self.target is None else f":{self.target}"
        return f"{self.fault}{target}" + ("" if self.point is None else f"@{self.point}")


def is_rank(target: str) -> bool:
    """Whether *target* is a rank's number."""
    return target.isascii() and target.isdigit()


def check_target(fault: Fault, target: str) -> None:
    """Raise unless *fault* can be done to *target*."""
    if target not in TARGETS and not is_rank(target):
        there = ", ".join(TARGETS)
        raise SpecError("target", target, f"no such target; there is {there}, or a rank's number")
    if target in PARTS and target not in fault.parts:
        can = ", ".join(("random", "a rank", *fault.parts))
        raise SpecError("target", target, f"{fault.name} ({fault.about}) can be done to {can}")


def check_point(fault: Fault, point: str) -> None:
    """Raise unless *fault* can be aimed at *point*."""
    if point not in POINTS:
        raise SpecError("point", point, f"no such point; there is {', '.join(POINTS)}")
    if point not in fault.points:
        can = ", ".join(fault.points) or "no point: it comes when it comes"
        raise SpecError("point", point, f"{fault.name} ({fault.about}) can be aimed at {can}")
