"""What is told of devices, in the form of `events`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Cause = Literal["memory", "fault", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceQuarantined:
    """A device is put aside: nobody is given it, until `DeviceRestored`.

    Attributes:
        device: Its UUID, or the name of a CPU slot.
        cause: ``memory`` (a dead worker's is not released), ``fault`` (the device has one) or
            ``user`` (`DevicePool.quarantine`).
        reason: The same in words.
        fatal: Whether what runs on it cannot go on.
        holders: Who still has a lease on it.
    """

    event: ClassVar[str] = "phalanx.device_quarantined"
    level: ClassVar[str] = "error"
    device: str
    name: str
    cause: Cause
    reason: str
    fatal: bool
    holders: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRestored:
    """A device that was put aside can be leased again.

    Attributes:
        cause: Why it had been put aside.
        why: ``recovered`` (what was wrong is over) or ``user`` (`DevicePool.restore`).
        after: Seconds it was put aside.
    """

    event: ClassVar[str] = "phalanx.device_restored"
    level: ClassVar[str] = "info"
    device: str
    name: str
    cause: Cause
    why: Literal["recovered", "user"]
    after: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAwaited:
    """A restart waits for a device: every one is in quarantine, or leased to others.

    Attributes:
        timeout: Seconds until the group gives up; None for never.
    """

    event: ClassVar[str] = "phalanx.device_awaited"
    level: ClassVar[str] = "warning"
    group: str
    ranks: tuple[int, ...]
    reason: str
    timeout: float | None
    at: float


DeviceEvent = DeviceQuarantined | DeviceRestored
