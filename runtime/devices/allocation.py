"""Which device is given to whom: the choice, apart from giving it.

Guarantees: all of a group's ranks are placed, or none. A rank that had devices before gets those
again where they are well; else it gets those of its own number, else the first that have room: one
device is filled before the next is begun. What is in quarantine is given to nobody.

Left to others: asking the devices, and noting who has what (`devices`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.supervision import NoDevice, SpecError

from .device import Slot
from .lease import Lease

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .lease import Request

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Unplaced:
    """There is no device for *request*.

    Attributes:
        soon: Whether memory is being released just now that could change that.
    """

    request: Request
    soon: bool


def place(
    order: Sequence[Slot], requests: Sequence[Request], share: float
) -> list[list[Slot]] | Unplaced:
    """Return the slots of each request.

    Args:
        order: What there is; one that may be leased twice stands here twice.
        requests: Who asks.
        share: How many devices each, or which part of one.
    """
    slots = list(dict.fromkeys(order))
    count, part = (int(share), 1.0) if share >= 1 else (1, share)
    taken: dict[Slot, float] = {}
    placed: dict[int, list[Slot]] = {}

    def has_room(slot: Slot) -> bool:
        return slot.quarantine is None and slot.has_room(taken.get(slot, 0.0) + part)

    def take(number: int, chosen: list[Slot]) -> bool:
        if len(set(chosen)) < count or not all(map(has_room, chosen)):
            return False
        for slot in chosen:
            taken[slot] = taken.get(slot, 0.0) + part
        placed[number] = chosen
        return True

    # First of all who had devices: else a newcomer takes what another is to have again.
    by_name = {slot.name: slot for slot in slots}
    for number, request in enumerate(requests):
        own = [by_name[name] for name in request.again if name in by_name]
        if len(own) != count or take(number, own):
            continue
        # Who is leaving makes room for one of us: two ranks may have had one device, in turns.
        if all(
            slot.quarantine is None and slot.has_room(taken.get(slot, 0.0) + part, after=True)
            for slot in own
        ):
            return Unplaced(request, soon=True)  # they are its own in a moment
    for number, request in enumerate(requests):
        at = int(request.rank * share + _EPSILON)
        if number not in placed:
            take(number, list(order[at : at + count]))
    for number, request in enumerate(requests):
        if number not in placed and not take(number, list(filter(has_room, slots))[:count]):
            return Unplaced(request, soon=any(slot.leaving for slot in slots))
    return [placed[number] for number in range(len(requests))]


def nothing(slots: Sequence[Slot], unplaced: Unplaced, share: float) -> NoDevice:
    """Return the error that says who has what."""
    request = unplaced.request
    return NoDevice(
        request.holder or f"rank {request.rank}",
        share,
        leased={
            slot.label: tuple(lease.holder or "a lease" for lease in slot.leases)
            for slot in slots
            if slot.leases and slot.quarantine is None
        },
        quarantined={
            slot.label: slot.quarantine.reason for slot in slots if slot.quarantine is not None
        },
        releasing=tuple(slot.label for slot in slots if slot.leaving),
        soon=unplaced.soon,
    )


def check_kinds(order: Sequence[Slot], share: float) -> None:
    """Raise `SpecError` where devices are of a kind of which a process sees only one."""
    if share > 1 and any(slot.gpu is not None and slot.gpu.parent for slot in order):
        remedy = "CUDA sees one instance (MIG) in a process; give 1, or a part of one"
        raise SpecError("devices_per_rank", share, remedy)


def check_room(order: Sequence[Slot], world_size: int, share: float) -> None:
    """Raise `SpecError` where *world_size* leases of *share* could never be had together."""
    slots = set(order)
    if share == 1:
        fit = len(order)
    elif share < 1:
        fit = sum(slot.fits(share) for slot in slots)
    else:
        fit = len(slots) // int(share)
    if world_size > fit:
        raise SpecError(
            "world_size",
            world_size,
            f"{there(order)}: {fit} rank(s) can have {share:g} each; ask for fewer ranks, or give "
            "devices='cpu', or a part of a device to each with devices_per_rank=0.5, or name them "
            "in devices=[...], where one may stand twice",
        )


def there(order: Sequence[Slot]) -> str:
    """Return what there is, for people."""
    names = ", ".join(slot.label for slot in order)
    return f"{len(order)} device(s) to lease ({names or 'no GPU is visible here'})"


def add_cpu_slots(order: list[Slot], ranks: int, share: float) -> None:
    """Add slots to *order* until there is room for *ranks*; those that nobody has are used."""
    need = int(share) * ranks if share >= 1 else ranks
    free = sum(s.quarantine is None and s.has_room(min(share, 1.0)) for s in order)
    first = len(order)  # now: the list grows while it is extended, and a name must stay unique
    order.extend(Slot(f"cpu:{first + more}") for more in range(need - free))


def lease_of(
    request: Request, slots: Sequence[Slot], share: float, seen: Sequence[Slot] | None
) -> Lease:
    """Return the lease of *slots*.

    Args:
        request: Who gets it.
        slots: What is leased.
        share: As above.
        seen: What the worker is to see beside; None for nothing.
    """
    gpus = tuple(slot.gpu for slot in slots if slot.gpu is not None)
    names = tuple(slot.name for slot in slots)
    part = min(share, 1.0)
    if not gpus:
        return Lease(
            names,
            devices=("cpu",) * len(slots),
            # Nothing was leased, so nothing may be seen: a stray .cuda() fails instead of sharing.
            environment={"CUDA_VISIBLE_DEVICES": ""},
            share=part,
            holder=request.holder,
            places=("cpu",) * len(slots),
        )
    shown = list(gpus)
    if seen is not None:
        # One that is lost could keep CUDA from starting at all.
        well = (slot for slot in seen if slot.quarantine is None or not slot.quarantine.fatal)
        shown = [slot.gpu for slot in well if slot.gpu is not None]
    idle = slots[0].idle
    return Lease(
        names,
        devices=tuple(f"cuda:{shown.index(gpu)}" for gpu in gpus),
        gpus=gpus,
        environment={"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in shown)},
        share=part,
        holder=request.holder,
        used_bytes=None if idle is None else idle.used,
        places=tuple(slot.place for slot in slots),
    )
