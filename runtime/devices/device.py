"""One device as its pool keeps it: who has how much of it, who is leaving, and whether it is well.

Guarantees: no more is given out than there is; what a worker that is gone held counts as given out
until its memory is seen to be released.

How a release is seen: while nobody else holds the device, by the memory in use on it, which must be
back where it was before anybody held it. What other programs use is taken out of the sum where NVML
tells it for each process, so that they may grow and shrink. While others hold parts of the device
nobody can tell whose memory is whose: then the dead process must have left NVML's list, and the
memory in use must have stopped falling; what is left behind is found when the last one leaves.

Left to others: which device is given to whom, and when to look (`devices`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .events import Cause
    from .gpu import Fault, Gpu, GpuInventory
    from .lease import Lease

_EPSILON = 1e-6  # ten tenths are a whole
_SETTLED = 0.02  # seconds between two looks at memory that may still be falling


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory of a device at one moment; None for what could not be measured.

    Attributes:
        used: Bytes in use.
        foreign: Bytes that the processes which NVML lists say they use.
        pids: Those processes.
    """

    used: int | None
    foreign: int | None
    pids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, inventory: GpuInventory, uuid: str) -> Reading:
        """Look at the device *uuid* now."""
        used = inventory.used_bytes(uuid)
        listed: Mapping[int, int | None] | None = inventory.processes(uuid)
        if listed is None:
            return cls(used, None)
        each = [size for size in listed.values() if size is not None]
        whole = len(each) == len(listed)
        return cls(used, sum(each) if whole else None, frozenset(listed))

    def is_back_at(self, idle: Reading, slack: int, dead: frozenset[int]) -> bool:
        """Whether no more is in use than at *idle*, other programs left aside.

        Args:
            idle: What was in use before anybody held the device.
            slack: Bytes that may be missing.
            dead: Processes of ours that are gone: what they are still listed with is not released.
        """
        if self.used is None or idle.used is None:
            return False
        if self.used <= idle.used + slack:
            return True
        if self.foreign is None or idle.foreign is None or dead & self.pids:
            return False
        return self.used - self.foreign <= idle.used - idle.foreign + slack


@dataclass(slots=True, eq=False)
class Leaving:
    """A lease given back, whose memory is not yet seen to be released.

    Attributes:
        pid: The process that held it, which is dead; None where there was none.
    """

    lease: Lease
    pid: int | None
    deadline: float
    last_used: int | None = None
    looked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a device is put aside.

    Attributes:
        fatal: Whether what runs on it cannot go on.
        dead: The processes whose memory is not released.
    """

    cause: Cause
    reason: str
    since: float
    fatal: bool = False
    dead: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device of a pool at one moment.

    Attributes:
        device: Its UUID, or ``cpu:<number>``.
        index: Its place in the order of PCI addresses; None for a CPU slot.
        state: ``free``, ``leased`` (also where there is still room on it), ``releasing`` (a dead
            worker's memory is not seen to be released yet) or ``quarantined``.
        leased: How much of it is given out; 1.0 is all of it, more where it was named repeatedly.
        holders: Who holds it.
        reason: Why it is in quarantine; empty where it is not.
    """

    device: str
    index: int | None
    name: str
    state: Literal["free", "leased", "releasing", "quarantined"]
    leased: float
    holders: tuple[str, ...]
    reason: str


@dataclass(slots=True, eq=False)
class Slot:
    """One device.

    Attributes:
        capacity: How often it may be leased as a whole.
        place: What the driver itself would call it.
        idle: Its memory before anybody held it.
        accepted: Faults that the user has decided to live with.
    """

    name: str
    gpu: Gpu | None = None
    capacity: float = 1.0
    place: str = "cpu"
    leases: list[Lease] = field(default_factory=list["Lease"])
    leaving: list[Leaving] = field(default_factory=list[Leaving])
    idle: Reading | None = None
    quarantine: Quarantine | None = None
    accepted: frozenset[Fault] = frozenset()

    @property
    def label(self) -> str:
        """What people call it."""
        gpu = self.gpu
        return self.name if gpu is None else f"{gpu.index}: {gpu.name or gpu.uuid}"

    @property
    def given(self) -> float:
        """How much of it is given out, to who is leaving too."""
        leaving = sum(one.lease.share for one in self.leaving)
        return sum(lease.share for lease in self.leases) + leaving

    def has_room(self, share: float, *, after: bool = False) -> bool:
        """Whether *share* of it can be given out; with *after*, once those leaving have left."""
        given = sum(lease.share for lease in self.leases) if after else self.given
        return given + share <= self.capacity + _EPSILON

    def fits(self, share: float) -> int:
        """Return how many leases of *share* there can be at once."""
        return int(self.capacity / share + _EPSILON)

    def watch_release(
        self, inventory: GpuInventory | None, slack: int, now: float
    ) -> Quarantine | None:
        """Drop who has left; return why the device must be put aside, or None."""
        if not self.leaving:
            return None
        gpu, idle = self.gpu, self.idle
        if gpu is None or inventory is None or idle is None or idle.used is None:
            self.leaving.clear()  # there is nothing to measure
            return None
        if self.quarantine is not None and self.quarantine.fatal:
            self.leaving.clear()  # and nothing to wait for
            return None
        reading = Reading.of(inventory, gpu.uuid)
        problems: list[str] = []
        dead: set[int] = set()
        for one in tuple(self.leaving):
            if self._has_left(one, reading, idle, slack, now):
                self.leaving.remove(one)
            elif now >= one.deadline:
                self.leaving.remove(one)
                residue = self._residue(one, reading, idle)
                if residue:
                    problems.append(residue)
                    dead |= {one.pid} if one.pid is not None else set()
        if not problems:
            return None
        return Quarantine("memory", problems[0], now, dead=frozenset(dead))

    def is_released(self, inventory: GpuInventory | None, slack: int) -> bool:
        """Whether the memory for which it was put aside is free by now."""
        quarantine = self.quarantine
        if self.leases or self.gpu is None or inventory is None or self.idle is None:
            return False
        dead = frozenset[int]() if quarantine is None else quarantine.dead
        return Reading.of(inventory, self.gpu.uuid).is_back_at(self.idle, slack, dead)

    def faults(
        self, inventory: GpuInventory | None, tolerate: Callable[[Fault], bool] | None
    ) -> tuple[Fault, ...]:
        """Return what is wrong with it and is not accepted."""
        if self.gpu is None or inventory is None:
            return ()
        found = inventory.faults(self.gpu.uuid)
        return tuple(
            fault
            for fault in found
            if fault not in self.accepted and not (tolerate is not None and tolerate(fault))
        )

    def status(self) -> DeviceStatus:
        """Return what it is now."""
        state: Literal["free", "leased", "releasing", "quarantined"] = "free"
        if self.quarantine is not None:
            state = "quarantined"
        elif self.leaving:
            state = "releasing"
        elif self.leases:
            state = "leased"
        return DeviceStatus(
            device=self.name,
            index=None if self.gpu is None else self.gpu.index,
            name="" if self.gpu is None else self.gpu.name,
            state=state,
            leased=round(self.given, 6),
            holders=tuple(lease.holder for lease in self.leases),
            reason="" if self.quarantine is None else self.quarantine.reason,
        )

    def _has_left(
        self, one: Leaving, reading: Reading, idle: Reading, slack: int, now: float
    ) -> bool:
        dead = frozenset[int]() if one.pid is None else frozenset((one.pid,))
        if reading.is_back_at(idle, slack, dead):
            return True
        if reading.used is None or dead & reading.pids:
            return False
        if not self.leases:
            return False
        if now - one.looked_at < _SETTLED:
            return False
        falling = one.last_used is None or reading.used < one.last_used
        one.last_used, one.looked_at = reading.used, now
        return not falling

    def _residue(self, one: Leaving, reading: Reading, idle: Reading) -> str:
        """Return what *one* left behind; nothing where that may be its neighbours'."""
        who = f"{one.lease.holder or 'a worker'} (pid {one.pid}, dead)"
        if reading.used is None:
            return f"its memory cannot be measured any more; {who} held it"
        if self.leases and one.pid not in reading.pids:
            return ""
        before = idle.used or 0
        return (
            f"{_gib(reading.used)} GiB in use, {_gib(before)} GiB before {who} held it: "
            "not released in time"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"
