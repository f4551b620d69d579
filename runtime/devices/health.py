"""Which devices are put aside, why, and until when.

Guarantees: a device with a fault that nobody tolerates, or whose memory a dead worker still holds,
is put aside, and taken up again when what was wrong is over; each of both is told once to everybody
who listens.

Left to others: locking, and who is given what (`devices`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from .device import Quarantine
from .events import DeviceQuarantined, DeviceRestored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .device import Slot
    from .events import DeviceEvent
    from .gpu import Fault, GpuInventory

    Listener = Callable[[DeviceEvent], None]


class Ward:
    """Looks after the devices of one pool. Used under its lock, but for what `news` returns."""

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

    def examine(self, slots: Iterable[Slot]) -> None:
        """Put aside what has a fault, and take up what is well again."""
        for slot in slots:
            quarantine = slot.quarantine
            faults = slot.faults(self._inventory, self._tolerate)
            if faults:
                reason = "; ".join(fault.text for fault in faults)
                fatal = any(fault.fatal for fault in faults)
                if quarantine is None or (fatal and not quarantine.fatal):
                    now = time.monotonic()
                    self.put_aside(slot, Quarantine("fault", reason, now, fatal=fatal))
            elif quarantine is None:
                continue
            elif quarantine.cause == "fault" or (
                quarantine.cause == "memory" and slot.is_released(self._inventory, self._slack)
            ):
                self._take_up(slot, quarantine, "recovered")

    def watch_releases(self, slots: Iterable[Slot]) -> None:
        """See whose memory has been released, and put aside what has had its time for that."""
        now = time.monotonic()
        for slot in slots:
            found = slot.watch_release(self._inventory, self._slack, now)
            if found is not None and slot.quarantine is None:
                self.put_aside(slot, found)

    def put_aside(self, slot: Slot, quarantine: Quarantine) -> None:
        """Give *slot* to nobody from now on."""
        slot.quarantine = quarantine
        self._news.append(
            DeviceQuarantined(
                device=slot.name,
                name=slot.gpu.name if slot.gpu is not None else "",
                cause=quarantine.cause,
                reason=quarantine.reason,
                fatal=quarantine.fatal,
                holders=tuple(lease.holder for lease in slot.leases),
                at=quarantine.since,
            )
        )

    def accept(self, slot: Slot) -> None:
        """Take *slot* up at the user's word, with the faults it has now."""
        slot.accepted |= frozenset(slot.faults(self._inventory, None))
        if slot.quarantine is not None:
            self._take_up(slot, slot.quarantine, "user")

    def subscribe(self, listener: Listener, log: Listener | None) -> object:
        """Return what `unsubscribe` wants."""
        key = object()
        self._listeners[key] = listener
        if log is not None:
            self._logs[key] = log
        return key

    def unsubscribe(self, key: object) -> None:
        """Tell that subscriber nothing more."""
        self._listeners.pop(key, None)
        self._logs.pop(key, None)

    def news(self) -> tuple[list[DeviceEvent], list[Listener]]:
        """Return what has happened since the last time, and whom to tell."""
        news, self._news = self._news, []
        # A log that several subscribers share hears of it once.
        return news, [*self._listeners.values(), *dict.fromkeys(self._logs.values())]

    def _take_up(
        self, slot: Slot, quarantine: Quarantine, why: Literal["recovered", "user"]
    ) -> None:
        slot.quarantine = None
        now = time.monotonic()
        self._news.append(
            DeviceRestored(
                device=slot.name,
                name=slot.gpu.name if slot.gpu is not None else "",
                cause=quarantine.cause,
                why=why,
                after=now - quarantine.since,
                at=now,
            )
        )
