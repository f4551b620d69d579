"""What tests of device pools share: a deadline that is over, and what is put aside."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.runtime.devices.pool import DevicePool

GIB = 1 << 30


def past() -> float:
    return time.monotonic() - 1.0


def quarantined(pool: DevicePool) -> dict[str, str]:
    return {one.device: one.reason for one in pool.status() if one.state == "quarantined"}
