"""A worker's right to a device, or to several, or to a part of one.

Guarantees: it is a value; it says all that a worker must be started with to see its devices.

Left to others: who gets one, and when it is taken back (`devices`).
"""

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
        names: The devices: UUIDs, or ``cpu:<number>`` for CPU slots. Its own are told apart by
            these, whatever a worker calls them.
        devices: What the worker calls them: ``("cuda:0",)`` where it sees nothing else.
        gpus: Which ones they are; empty for a CPU slot.
        environment: What the worker must be started with, so that it sees what it shall.
        share: How much of each device: 1.0, or a fraction.
        holder: Who has it, for people.
        used_bytes: The memory in use on the first one before anybody held it; None where that was
            not measured.
        places: What the driver would call them itself; for a rank that runs inside it.
    """

    names: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    gpus: tuple[Gpu, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    share: float = 1.0
    holder: str = ""
    used_bytes: int | None = None
    places: tuple[str, ...] = ("cpu",)

    @property
    def device(self) -> str:
        """What the worker calls its device, or the first of several."""
        return self.devices[0]

    @property
    def gpu(self) -> Gpu | None:
        """Its GPU, or the first of several; None for a CPU slot."""
        return self.gpus[0] if self.gpus else None

    def __str__(self) -> str:
        return ",".join(gpu.uuid for gpu in self.gpus) or self.device


@dataclass(frozen=True, slots=True)
class Request:
    """What a lease is asked for with.

    Attributes:
        rank: Decides between devices that are as good as each other.
        holder: Who asks, for people.
        again: The names that its last lease had: it gets those again where they are well.
    """

    rank: int
    holder: str = ""
    again: tuple[str, ...] = ()


def check_share(share: object) -> float:
    """Return how many devices a rank gets, if that makes sense."""
    remedy = "give a whole number of devices, or a part of one above 0"
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise SpecError("devices_per_rank", share, remedy)
    if not 0 < share < float("inf") or (share > 1 and share != int(share)):
        raise SpecError("devices_per_rank", share, remedy)
    return share
