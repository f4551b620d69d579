"""The GPUs of a node, leased to its ranks: all of a launch together, or none.

A rank gets the devices of its last incarnation there, if they have no fault. A lease waits for
memory that a dead rank still holds.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from phalanx.runtime import DevicePool, Request
from phalanx.supervision import NoDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.cluster.link.messages import RankLaunch
    from phalanx.runtime import Lease

_SOON = 0.05  # seconds until a release is looked at again: NVML has no event for it


class NodeDevices:
    """The leases of one node. Thread-safe; every method may take its time over NVML."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: DevicePool | None = None
        self._leases: dict[tuple[int, int], Lease] = {}  # by rank and incarnation
        self._last: dict[int, tuple[str, ...]] = {}

    def lease(
        self, ranks: Sequence[RankLaunch], deadline: float, is_wanted: Callable[[], bool]
    ) -> dict[int, Lease]:
        """Lease the devices that each of *ranks* needs; return the leases of those that need any.

        Args:
            deadline: On the monotonic clock.
            is_wanted: Asked while it waits; the leases are given up if it returns False.

        Raises:
            SpecError: there are fewer devices than the ranks need.
            NoDevice: others hold them, or they are in quarantine.
        """
        wanted = [rank for rank in ranks if rank.gpus]
        if not wanted:
            return {}
        share = wanted[0].gpus
        with self._lock:
            if self._pool is None:
                self._pool = DevicePool.of("cuda", len(wanted), devices_per_rank=share)
            pool = self._pool
            requests = [
                Request(index, rank.label, self._last.get(rank.rank, ()))
                for index, rank in enumerate(wanted)
            ]
        while True:
            try:
                leases = pool.acquire(requests, share)
            except NoDevice as none:
                if not none.soon or time.monotonic() >= deadline or not is_wanted():
                    raise
                time.sleep(_SOON)
                continue
            with self._lock:
                for rank, lease in zip(wanted, leases, strict=True):
                    self._leases[rank.rank, rank.incarnation] = lease
                    self._last[rank.rank] = lease.names
            return {rank.rank: lease for rank, lease in zip(wanted, leases, strict=True)}

    def give_back(self, rank: int, incarnation: int, pid: int | None) -> None:
        """Release that incarnation's devices; its process *pid* has ended; None if it had none."""
        with self._lock:
            lease, pool = self._leases.pop((rank, incarnation), None), self._pool
        if lease is not None and pool is not None:
            pool.give_back(lease, pid)

    def look(self) -> dict[tuple[int, int], str]:
        """Look how the devices are; return the ranks that cannot go on, and why."""
        with self._lock:
            pool, leases = self._pool, dict(self._leases)
        broken = {} if pool is None else pool.look()
        return {who: broken[lease] for who, lease in leases.items() if lease in broken}
