"""Who may use which device: leases from a pool.

Guarantees: a device is leased to one worker at a time, and asking for more leases than there are
devices is refused before any process starts; a worker sees the device leased to it and no other;
a lease given back is leased again only when the worker's memory on it is released.

Left to others: finding the devices (`gpus`); ending the worker before its lease is given back.
A device that stays full is not yet put aside: `release` says so, and leases it again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from phalanx.supervision import SpecError

from .gpus import Gpu, find_gpus, select_gpu, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .gpus import GpuInventory

_SLACK_BYTES = 64 << 20  # other users of the device come and go; arbitrary
_LOOK_AGAIN = 0.02  # seconds; NVML has no event for memory that is released


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A worker's right to a device.

    Attributes:
        device: What the worker calls it: ``"cuda:0"``, being the only one it sees, or ``"cpu"``.
        gpu: Which one it is; None for a CPU slot.
        environment: What the worker must be started with, so that it sees this device only.
        used_bytes: The memory in use on it before the worker came; None where not measured.
    """

    device: str
    gpu: Gpu | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    used_bytes: int | None = None

    def __str__(self) -> str:
        return self.device if self.gpu is None else self.gpu.uuid


class DevicePool:
    """The devices that the ranks of a group share out, or those of several groups. Thread-safe.

    Args:
        gpus: What can be leased, in the order in which it is. A device that stands here twice is
            leased twice. None for CPU slots, of which there is no end.
        inventory: What measures their memory.
    """

    def __init__(self, gpus: Sequence[Gpu] | None, inventory: GpuInventory | None = None) -> None:
        self._gpus = None if gpus is None else tuple(gpus)
        self._inventory = inventory
        self._lock = threading.Lock()
        self._leased: list[Lease] = []

    @classmethod
    def of(
        cls,
        devices: Any,
        world_size: int,
        inventory: GpuInventory | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> DevicePool:
        """Return a pool that has a device for each of *world_size* ranks.

        Args:
            devices: None or ``"auto"`` for the GPUs that are visible, or CPU slots where there are
                none; ``"cpu"``; ``"cuda"`` for GPUs or an error; a list that names each device, by
                index, ``"cuda:1"`` or UUID; or a pool that several groups share.
            inventory: The machine's devices; None looks for them.

        Raises:
            SpecError: There are fewer devices than ranks, or none of that name.
        """
        if isinstance(devices, DevicePool):
            devices._check(world_size)  # noqa: SLF001  # one of us
            return devices
        if devices == "cpu":
            return cls(None)
        inventory = find_gpus() if inventory is None else inventory
        there = visible(inventory.gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
        if devices is None or devices == "auto":
            pool = cls(there or None, inventory)
        elif devices == "cuda":
            pool = cls(there, inventory)
        else:
            pool = cls(_named(devices, there), inventory)
        pool._check(world_size)
        return pool

    @property
    def size(self) -> int | None:
        """How many leases there can be at once; None for any number."""
        return None if self._gpus is None else len(self._gpus)

    def acquire(self, rank: int) -> Lease:
        """Lease a device to *rank*: the one of that number where it is free, else the first.

        Raises:
            SpecError: Every device is leased.
        """
        if self._gpus is None:
            # Nothing was leased, so nothing may be seen: a stray .cuda() fails instead of sharing.
            return Lease("cpu", environment={"CUDA_VISIBLE_DEVICES": ""})
        with self._lock:
            free = Counter(self._gpus) - Counter(lease.gpu for lease in self._leased if lease.gpu)
            if not free:
                raise SpecError("rank", rank, f"every device is leased; {self._there()}")
            own = self._gpus[rank : rank + 1]
            gpu = next(gpu for gpu in (*own, *self._gpus) if gpu in free)
            used = None if self._inventory is None else self._inventory.used_bytes(gpu.uuid)
            lease = Lease("cuda:0", gpu, {"CUDA_VISIBLE_DEVICES": gpu.uuid}, used)
            self._leased.append(lease)
        return lease

    def release(self, lease: Lease, deadline: float) -> bool:
        """Take *lease* back once its device is free; return whether it was by *deadline*."""
        with self._lock:
            if lease not in self._leased:
                return True
        free = self.release_gate(lease, deadline)
        with self._lock:
            if lease in self._leased:
                self._leased.remove(lease)
        return free

    def release_gate(self, lease: Lease, deadline: float) -> bool:
        """Wait until what the worker held on its device is released; False at *deadline*.

        A CPU slot is free at once, and so is a device whose memory cannot be measured, or that
        somebody else has a lease on too: nobody can tell whose memory that is.
        """
        gpu, before = lease.gpu, lease.used_bytes
        if gpu is None or before is None or self._inventory is None:
            return True
        while True:
            with self._lock:
                shared = any(other.gpu == gpu for other in self._leased if other is not lease)
            used = self._inventory.used_bytes(gpu.uuid)
            if shared or used is None or used <= before + _SLACK_BYTES:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_AGAIN)

    def close(self) -> None:
        """Let go of NVIDIA's driver; a pool that others share goes on."""
        if self._inventory is not None:
            self._inventory.close()

    def _check(self, world_size: int) -> None:
        if self._gpus is not None and world_size > len(self._gpus):
            raise SpecError(
                "world_size",
                world_size,
                f"{self._there()}: one is leased to each rank; ask for fewer ranks, or give "
                "devices='cpu', or name them in devices=[...], where one may stand twice",
            )

    def _there(self) -> str:
        there = self._gpus or ()
        names = ", ".join(f"{gpu.index}: {gpu.name or gpu.uuid}" for gpu in there)
        return f"{len(there)} device(s) to lease ({names or 'no GPU is visible here'})"


def _named(devices: object, there: Sequence[Gpu]) -> tuple[Gpu, ...]:
    shown = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in there) or "no GPU is visible here"
    remedy = f"not a device; there is: {shown}; or 'auto', 'cpu', 'cuda', a list of these, a pool"
    if not isinstance(devices, list | tuple):
        raise SpecError("devices", devices, remedy)
    chosen: list[Gpu] = []
    for name in cast("Sequence[object]", devices):
        gpu = None
        if isinstance(name, int | str) and not isinstance(name, bool):
            gpu = select_gpu(there, str(name))
        if gpu is None:
            raise SpecError("devices", name, remedy)
        chosen.append(gpu)
    return tuple(chosen)
