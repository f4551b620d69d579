"""Allocation: assigns devices to ranks, and describes their leases.

A lease is the right of a worker to a device, to several, or to a part of one. All ranks of a
request are placed, or none. A rank that had devices before gets those again if they have no fault;
else those of its number, else the first that have room: one device is filled before the next
is begun. No device in quarantine is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from phalanx.supervision import NoDevice, SpecError

from .device import EPSILON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .device import Device
    from .inventory import Gpu

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
        places: Their names in the driver, for a rank that runs inside it.
    """

    names: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    gpus: tuple[Gpu, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    share: float = 1.0
    holder: str = ""
    places: tuple[str, ...] = ("cpu",)

    @classmethod
    def cpu(cls, holder: str, count: int) -> Lease:
        """Return the lease of *count* CPU slots, with which the worker sees no GPU."""
        slots = ("cpu",) * count
        hidden = {"CUDA_VISIBLE_DEVICES": ""}  # a stray .cuda() fails instead of sharing
        return cls(slots, slots, environment=hidden, holder=holder, places=slots)

    def __str__(self) -> str:
        return ",".join(gpu.uuid for gpu in self.gpus) or self.devices[0]


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a lease.

    Attributes:
        rank: Gets the device of that number if it is free, else the first.
        holder: A name for status and messages.
        again: The devices of its last lease: they are leased again if they are well, and waited
            for if their memory is being released.
    """

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


def place(order: Sequence[Device], requests: Sequence[Request], share: float) -> list[list[Device]]:
    """Return the devices of each request, or raise `NoDevice`.

    Args:
        order: The pool's devices; one that may be leased twice stands here twice.
        share: How many devices each, or which part of one.
    """
    devices = list(dict.fromkeys(order))
    count, part = (int(share), 1.0) if share >= 1 else (1, share)
    taken: dict[Device, float] = {}
    placed: dict[int, list[Device]] = {}

    def has_room(device: Device, *, after: bool = False) -> bool:
        wanted = taken.get(device, 0.0) + part
        return device.quarantine is None and device.has_room(wanted, after=after)

    def take(number: int, chosen: list[Device]) -> bool:
        if len(set(chosen)) < count or not all(map(has_room, chosen)):
            return False
        for device in chosen:
            taken[device] = taken.get(device, 0.0) + part
        placed[number] = chosen
        return True

    # Ranks that had devices come first: else a new one takes what another is to have again.
    by_name = {device.uuid: device for device in devices}
    for number, request in enumerate(requests):
        own = [by_name[name] for name in request.again if name in by_name]
        if len(own) != count or take(number, own):
            continue
        # What is released makes room for one of them: two ranks may have had one device, in turns.
        if all(has_room(device, after=True) for device in own):
            raise _no_device(devices, request, share, soon=True)
    for number, request in enumerate(requests):
        at = int(request.rank * share + EPSILON)
        if number not in placed:
            take(number, list(order[at : at + count]))
    for number, request in enumerate(requests):
        if number not in placed and not take(number, list(filter(has_room, devices))[:count]):
            soon = any(device.leaving for device in devices)
            raise _no_device(devices, request, share, soon=soon)
    return [placed[number] for number in range(len(requests))]


def _no_device(
    devices: Sequence[Device], request: Request, share: float, *, soon: bool
) -> NoDevice:
    """Return the error that names the holders; *soon*: memory is released that could change it."""
    return NoDevice(
        request.holder or f"rank {request.rank}",
        share,
        leased={
            device.label: tuple(lease.holder or "a lease" for lease in device.leases)
            for device in devices
            if device.leases and device.quarantine is None
        },
        quarantined={
            device.label: device.quarantine.reason
            for device in devices
            if device.quarantine is not None
        },
        releasing=tuple(device.label for device in devices if device.leaving),
        soon=soon,
    )


def check_room(order: Sequence[Device], world_size: int, share: float) -> None:
    """Raise `SpecError` if *world_size* leases of *share* could never be had together."""
    devices = set(order)
    if share > 1 and any(device.gpu.parent for device in devices):
        remedy = "CUDA sees one instance (MIG) in a process; give 1, or a part of one"
        raise SpecError("devices.per_rank", share, remedy)
    if share == 1:
        fit = len(order)
    elif share < 1:
        fit = sum(int(device.capacity / share + EPSILON) for device in devices)
    else:
        fit = len(devices) // int(share)
    if world_size > fit:
        raise SpecError(
            "world_size",
            world_size,
            f"{names_of(order)}: {fit} rank(s) can have {share:g} each; ask for fewer ranks, or "
            "give devices='cpu', or a part of a device to each with devices.per_rank=0.5, or name "
            "them in devices=[...], where one may stand twice",
        )


def names_of(order: Sequence[Device]) -> str:
    """Return the devices of a pool in words."""
    names = ", ".join(device.label for device in order)
    return f"{len(order)} device(s) to lease ({names or 'no GPU is visible here'})"


def lease_of(
    request: Request, devices: Sequence[Device], share: float, seen: Sequence[Device] | None
) -> Lease:
    """Return the lease of *devices* for *request*.

    Args:
        seen: The devices that the worker sees; None: those that are leased to it.
    """
    shown = [device.gpu for device in devices]
    if seen is not None:
        # A lost device could keep CUDA from starting.
        shown = [one.gpu for one in seen if one.quarantine is None or not one.quarantine.fatal]
    return Lease(
        tuple(device.uuid for device in devices),
        devices=tuple(f"cuda:{shown.index(device.gpu)}" for device in devices),
        gpus=tuple(device.gpu for device in devices),
        environment={"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in shown)},
        share=min(share, 1.0),
        holder=request.holder,
        places=tuple(device.place for device in devices),
    )
