"""Interim: the interface the executor uses; engineer R replaces the inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Lease:
    device: str
    environment: Mapping[str, str] = field(default_factory=dict)


class DevicePool:
    @classmethod
    def of(cls, devices: Any, size: int) -> DevicePool:
        """Return a pool from what the user gave (None, a pool, a sequence of devices)."""
        if devices is not None and len(devices) < size:
            raise SpecError("devices", devices, f"fewer than {size} ranks")
        return cls()

    def acquire(self, rank: int) -> Lease:
        return Lease("cpu")

    def release(self, lease: Lease, deadline: float) -> None:
        pass

    def close(self) -> None:
        pass
