"""What tests of device pools share."""

from __future__ import annotations

import time
from typing import Any

from phalanx.runtime.devices.allocation import Lease, Request, Visibility
from phalanx.runtime.devices.pool import DevicePool

GIB = 1 << 30


def lease_of(
    pool: DevicePool,
    rank: int,
    *,
    share: float = 1,
    visibility: Visibility = "one",
    **request: Any,
) -> Lease:
    return pool.acquire([Request(rank, **request)], share, visibility)[0]


def release(pool: DevicePool, lease: Lease, pid: int | None = None) -> bool:
    """Give *lease* back; return whether its memory was released in time."""
    pool.give_back(lease, pid)
    return pool.settle([lease], time.monotonic() + 10)


def quarantined(pool: DevicePool) -> dict[str, str]:
    return {one.device: one.reason for one in pool.status() if one.state == "quarantined"}
