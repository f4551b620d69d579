"""State of one device of a pool: leases, release of a dead worker's memory, quarantine; events.

The part of a dead worker counts as leased until its memory is seen to be released: while no other
lease is left, as much memory is in use as before the first lease, or less. Memory of other programs
is left out as far as NVML lists it per process. While other leases remain memory cannot be
attributed to a process: the dead process must have left NVML's list, and memory that it left behind
is found when the last lease ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from phalanx.runtime.event import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from .allocation import Lease
    from .inventory import Fault, Gpu, GpuInventory

EPSILON = 1e-6  # ten tenths are a whole

Cause = Literal["memory", "fault", "user"]


class DeviceQuarantined(Event, event="device_quarantined", level="error"):
    """A device is in quarantine: it is not leased until `DeviceRestored`.

    Attributes:
        device: Its UUID.
        cause: ``memory`` (a dead worker's is not released), ``fault`` (the device has one) or
            ``user`` (`DevicePool.quarantine`).
        fatal: Whether the processes that use it cannot go on.
    """

    device: str
    name: str
    cause: Cause
    reason: str
    fatal: bool
    holders: tuple[str, ...]


class DeviceRestored(Event, event="device_restored"):
    """A device is out of quarantine.

    Attributes:
        why: ``recovered`` (the cause is over) or ``user`` (`DevicePool.restore`).
        after: Seconds in quarantine.
    """

    device: str
    name: str
    cause: Cause
    why: Literal["recovered", "user"]
    after: float


class DeviceAwaited(Event, event="device_awaited", level="warning"):
    """A restart waits for a device: each is in quarantine or leased.

    Attributes:
        timeout: Seconds until the group gives up; None for never.
    """

    group: str
    ranks: tuple[int, ...]
    reason: str
    timeout: float | None


DeviceEvent = DeviceQuarantined | DeviceRestored


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory of a device at one moment.

    Attributes:
        used: Bytes in use; None if they could not be measured.
        unlisted: Those of them that NVML lists with no living process.
    """

    used: int | None
    unlisted: int
    pids: frozenset[int]

    @classmethod
    def of(cls, inventory: GpuInventory, uuid: str, dead: frozenset[int] = frozenset()) -> Reading:
        """Return the memory of the device *uuid* now; the processes *dead* are not living."""
        used = inventory.used_bytes(uuid)
        listed = inventory.processes(uuid) or {}
        living = sum(size or 0 for pid, size in listed.items() if pid not in dead)
        return cls(used, (used or 0) - living, frozenset(listed))

    def is_back_at(self, idle: Reading, slack: int) -> bool:
        """Whether no more is in use than at *idle*, with *slack* bytes of tolerance."""
        if self.used is None or idle.used is None:
            return False
        return self.used <= idle.used + slack or self.unlisted <= idle.unlisted + slack


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """A lease given back, whose memory is not yet seen to be released.

    Attributes:
        pid: The process that held it, which is dead; None if there was none.
    """

    lease: Lease
    pid: int | None
    deadline: float

    @property
    def dead(self) -> frozenset[int]:
        """The process that held it, if there was one."""
        return frozenset() if self.pid is None else frozenset((self.pid,))


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a device is not leased.

    Attributes:
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
        device: Its UUID.
        index: Its place in the order of PCI addresses.
        state: ``free``, ``leased`` (also if there is still room on it), ``releasing`` (a dead
            worker's memory is not seen to be released yet) or ``quarantined``.
        leased: How much of it is leased; 1.0 is all of it, more if it was named repeatedly.
        reason: Why it is in quarantine; empty if it is not.
        releasing_bytes: Memory of dead workers that is not seen to be released yet.
    """

    device: str
    index: int | None
    name: str
    state: Literal["free", "leased", "releasing", "quarantined"]
    leased: float
    holders: tuple[str, ...]
    reason: str
    releasing_bytes: int = 0


@dataclass(slots=True, eq=False)
class Device:
    """One device.

    Attributes:
        capacity: How often it may be leased as a whole.
        place: Its name in CUDA, in the driver's own process.
        idle: Its memory before the first lease.
        releasing_bytes: Memory of dead workers, by the last reading; also in quarantine.
        accepted: Faults that the user has accepted.
    """

    gpu: Gpu
    place: str
    capacity: float = 1.0
    leases: list[Lease] = field(default_factory=list["Lease"])
    leaving: list[Leaving] = field(default_factory=list[Leaving])
    idle: Reading | None = None
    releasing_bytes: int = 0
    quarantine: Quarantine | None = None
    accepted: frozenset[Fault] = frozenset()

    @property
    def uuid(self) -> str:
        """Its UUID, by which it is leased."""
        return self.gpu.uuid

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.gpu.index}: {self.gpu.name or self.gpu.uuid}"

    @property
    def leased(self) -> float:
        """The share of it that is leased, or not released yet."""
        leaving = sum(one.lease.share for one in self.leaving)
        return sum(lease.share for lease in self.leases) + leaving

    def has_room(self, share: float, *, after: bool = False) -> bool:
        """Whether *share* of it can be leased; with *after*, once all is released."""
        leased = sum(lease.share for lease in self.leases) if after else self.leased
        return leased + share <= self.capacity + EPSILON

    def watch_release(self, inventory: GpuInventory, slack: int, now: float) -> Quarantine | None:
        """Drop what is released; return the quarantine of a device that has not been in time."""
        idle = self.idle
        if idle is None or idle.used is None or (self.quarantine and self.quarantine.fatal):
            self.leaving.clear()  # there is nothing to measure, or nothing to wait for
        found: Quarantine | None = None
        self.releasing_bytes = 0
        for one in tuple(self.leaving):
            assert idle is not None
            reading = Reading.of(inventory, self.uuid, one.dead)
            gone = self.leases and reading.used is not None and not one.dead & reading.pids
            if gone or reading.is_back_at(idle, slack):
                self.leaving.remove(one)
                continue
            more = min((reading.used or 0) - (idle.used or 0), reading.unlisted - idle.unlisted)
            self.releasing_bytes = max(self.releasing_bytes, more)
            if now >= one.deadline:
                self.leaving.remove(one)
                dead = one.dead if found is None else one.dead | found.dead
                reason = self._residue(one, reading, idle) if found is None else found.reason
                found = Quarantine("memory", reason, now, dead=dead)
        return found

    def is_released(self, inventory: GpuInventory, slack: int) -> bool:
        """Whether the memory for which it is in quarantine is free by now."""
        if self.leases or self.idle is None:
            return False
        dead = frozenset[int]() if self.quarantine is None else self.quarantine.dead
        return Reading.of(inventory, self.uuid, dead).is_back_at(self.idle, slack)

    def faults(
        self, inventory: GpuInventory, tolerate: Callable[[Fault], bool] | None
    ) -> tuple[Fault, ...]:
        """Return its faults that are not accepted."""
        return tuple(
            fault
            for fault in inventory.faults(self.uuid)
            if fault not in self.accepted and not (tolerate is not None and tolerate(fault))
        )

    def status(self) -> DeviceStatus:
        """Return its state now."""
        state: Literal["free", "leased", "releasing", "quarantined"] = "free"
        if self.quarantine is not None:
            state = "quarantined"
        elif self.leaving:
            state = "releasing"
        elif self.leases:
            state = "leased"
        return DeviceStatus(
            device=self.uuid,
            index=self.gpu.index,
            name=self.gpu.name,
            state=state,
            leased=round(self.leased, 6),
            holders=tuple(lease.holder for lease in self.leases),
            reason="" if self.quarantine is None else self.quarantine.reason,
            releasing_bytes=self.releasing_bytes,
        )

    def _residue(self, one: Leaving, reading: Reading, idle: Reading) -> str:
        who = f"{one.lease.holder or 'a worker'} (pid {one.pid}, dead)"
        if reading.used is None:
            return f"its memory cannot be measured any more; {who} held it"
        return (
            f"{_gib(reading.used)} GiB in use, {_gib(idle.used or 0)} GiB before {who} held it: "
            "not released in time"
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"
