"""Device health: puts devices into quarantine and takes them out again.

Guarantees: a device with a fault that is not tolerated, or whose memory a dead worker still holds,
is in quarantine until that is over; each change is reported once to every subscriber.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from .device import Quarantine
from .events import DeviceQuarantined, DeviceRestored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .device import Device
    from .events import DeviceEvent
    from .gpu import Fault, GpuInventory

    Listener = Callable[[DeviceEvent], None]


class DeviceHealth:
    """The health of one pool's devices. Used under the pool's lock, except what `news` returns."""

    def __init__(
        self,
        inventory: GpuInventory | None,
        slack_bytes: int,
        tolerate: Callable[[Fault], bool] | None,
    ) -> None:
        self._inventory = inventory
        self._slack = slack_bytes
        self._tolerate = tolerate
        self._news: list[DeviceEvent] = []
        self._listeners: dict[object, Listener] = {}
        self._logs: dict[object, Listener] = {}

    def examine(self, devices: Iterable[Device]) -> None:
        """Put faulty devices into quarantine, and take out those that are well again."""
        if self._inventory is None:
            return  # slots of the CPU
        for device in devices:
            quarantine = device.quarantine
            faults = device.faults(self._inventory, self._tolerate)
            if faults:
                reason = "; ".join(fault.text for fault in faults)
                fatal = any(fault.fatal for fault in faults)
                if quarantine is None or (fatal and not quarantine.fatal):
                    now = time.monotonic()
                    self.quarantine(device, Quarantine("fault", reason, now, fatal=fatal))
            elif quarantine is not None and (
                quarantine.cause == "fault"
                or (
                    quarantine.cause == "memory"
                    and device.is_released(self._inventory, self._slack)
                )
            ):
                self._restore(device, quarantine, "recovered")

    def watch_releases(self, devices: Iterable[Device]) -> None:
        """Drop what is released; put devices into quarantine whose deadline has passed."""
        now = time.monotonic()
        for device in devices:
            if not device.leaving:
                continue
            assert self._inventory is not None
            found = device.watch_release(self._inventory, self._slack, now)
            if found is not None and device.quarantine is None:
                self.quarantine(device, found)

    def quarantine(self, device: Device, quarantine: Quarantine) -> None:
        """Put *device* into *quarantine*."""
        device.quarantine = quarantine
        self._news.append(
            DeviceQuarantined(
                device=device.uuid,
                name=device.gpu.name,
                cause=quarantine.cause,
                reason=quarantine.reason,
                fatal=quarantine.fatal,
                holders=tuple(lease.holder for lease in device.leases),
                at=quarantine.since,
            )
        )

    def accept(self, device: Device) -> None:
        """Take *device* out at the user's request; the faults it has now are accepted."""
        assert self._inventory is not None
        device.accepted |= frozenset(device.faults(self._inventory, None))
        if device.quarantine is not None:
            self._restore(device, device.quarantine, "user")

    def subscribe(self, listener: Listener, log: Listener | None) -> Callable[[], None]:
        """Add a subscriber; return the function that removes it."""
        key = object()
        self._listeners[key] = listener
        if log is not None:
            self._logs[key] = log

        def cancel() -> None:
            self._listeners.pop(key, None)
            self._logs.pop(key, None)

        return cancel

    def news(self) -> tuple[list[DeviceEvent], list[Listener]]:
        """Return the events since the last call, and the functions to call with each."""
        news, self._news = self._news, []
        # A log that several subscribers share gets each event once.
        return news, [*self._listeners.values(), *dict.fromkeys(self._logs.values())]

    def _restore(
        self, device: Device, quarantine: Quarantine, why: Literal["recovered", "user"]
    ) -> None:
        device.quarantine = None
        now = time.monotonic()
        self._news.append(
            DeviceRestored(
                device=device.uuid,
                name=device.gpu.name,
                cause=quarantine.cause,
                why=why,
                after=now - quarantine.since,
                at=now,
            )
        )
