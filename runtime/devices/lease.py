"""Lease: the right of a worker to a device, to several, or to a part of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .gpu import Gpu

Visibility = Literal["one", "all"]


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A worker's right to devices.

    Attributes:
        names: The UUIDs of the devices, or ``cpu``.
        devices: Their names in the worker: ``("cuda:0",)`` if it sees no other.
        gpus: The devices; empty for CPU slots.
        environment: Variables with which the worker sees its devices.
        share: How much of each device: 1.0, or a fraction.
        holder: Its holder's name in status and messages.
        used_bytes: The memory in use on the first device before the first lease; None if that was
            not measured.
        places: Their names in the driver, for a rank that runs inside it.
    """

    names: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    gpus: tuple[Gpu, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    share: float = 1.0
    holder: str = ""
    used_bytes: int | None = None
    places: tuple[str, ...] = ("cpu",)

    @classmethod
    def cpu(cls, holder: str, count: int) -> Lease:
        """Return the lease of *count* CPU slots, with which the worker sees no GPU."""
        slots = ("cpu",) * count
        hidden = {"CUDA_VISIBLE_DEVICES": ""}  # a stray .cuda() fails instead of sharing
        return cls(slots, slots, environment=hidden, holder=holder, places=slots)

    @property
    def device(self) -> str:
        """The worker's name of its device, or of the first of several."""
        return self.devices[0]

    @property
    def gpu(self) -> Gpu | None:
        """Its GPU, or the first of several; None for a CPU slot."""
        return self.gpus[0] if self.gpus else None

    def __str__(self) -> str:
        return ",".join(gpu.uuid for gpu in self.gpus) or self.device


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a lease; see `DevicePool.acquire`."""

    rank: int
    holder: str = ""
    again: tuple[str, ...] = ()


def check_share(share: object) -> float:
    """Return *share*, the number of devices of a rank, if it is whole or a fraction of one."""
    remedy = "give a whole number of devices, or a part of one above 0"
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise SpecError("devices.per_rank", share, remedy)
    if not 0 < share < float("inf") or (share > 1 and share != int(share)):
        raise SpecError("devices.per_rank", share, remedy)
    return share
