"""Events of devices."""

from __future__ import annotations

from typing import Literal

from phalanx.runtime.event import Event

Cause = Literal["memory", "fault", "user"]


class DeviceQuarantined(Event, event="device_quarantined", level="error"):
    """A device is in quarantine: it is not leased until `DeviceRestored`.

    Attributes:
        device: Its UUID.
        cause: ``memory`` (a dead worker's is not released), ``fault`` (the device has one) or
            ``user`` (`DevicePool.quarantine`).
        reason: The same in words.
        fatal: Whether the processes that use it cannot go on.
        holders: The holders of present leases.
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
        cause: Why it was in quarantine.
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
