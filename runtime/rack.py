"""The devices of one pool, in the order in which they are leased.

Guarantees: a device that was named twice is one slot that can be leased twice; one is found by its
name, its index, what CUDA calls it, or its UUID; what can never be had is refused with what there
is.

Left to others: locking, and who has which (`devices`); which is given to whom (`placement`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.supervision import SpecError

from .gpus import select_gpu
from .placement import add_cpu_slots, check_kinds, check_room, there
from .slot import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .gpus import Gpu


class Rack:
    """The slots of a pool. Used under its lock.

    Args:
        gpus: See `DevicePool`; None for CPU slots.
        cpus: How many CPU slots there are then; None for any number.

    Attributes:
        order: The slots as they are leased; one that was named twice stands here twice.
    """

    def __init__(self, gpus: Sequence[Gpu] | None, cpus: int | None) -> None:
        self._is_endless = gpus is None and cpus is None
        self.order: list[Slot] = []
        if gpus is None:
            self.order = [Slot(f"cpu:{number}") for number in range(cpus or 0)]
            return
        known: dict[str, Slot] = {}
        for number, gpu in enumerate(gpus):
            slot = known.get(gpu.uuid)
            if slot is None:
                slot = known[gpu.uuid] = Slot(gpu.uuid, gpu, place=f"cuda:{number}")
            else:
                slot.capacity += 1
            self.order.append(slot)

    @property
    def size(self) -> int | None:
        """How many whole leases there can be at once; None for any number."""
        return None if self._is_endless else len(self.order)

    def slots(self) -> list[Slot]:
        """Return each device once."""
        return list(dict.fromkeys(self.order))

    def place(self, seen: Sequence[Gpu]) -> None:
        """Note what CUDA in this process, which sees *seen*, would call each device."""
        for slot in self.order:
            if slot.gpu is not None:
                slot.place = f"cuda:{seen.index(slot.gpu)}"

    def find(self, device: int | str) -> Slot:
        """Return the slot of *device*.

        Raises:
            SpecError: there is none of that name.
        """
        slots = self.slots()
        for slot in slots:
            if slot.name == device:
                return slot
        gpus = [slot.gpu for slot in slots if slot.gpu is not None]
        gpu = None if isinstance(device, bool) else select_gpu(gpus, str(device))
        for slot in slots:
            if gpu is not None and slot.gpu == gpu:
                return slot
        raise SpecError("device", device, f"not in this pool, which has {there(self.order)}")

    def make_room(self, ranks: int, share: float) -> None:
        """Where any number of CPU slots may be had, see that *ranks* more find one."""
        if self._is_endless:
            add_cpu_slots(self.order, ranks, share)

    def check(self, world_size: int, share: float) -> None:
        """Raise SpecError where *world_size* leases of *share* could never be had together."""
        check_kinds(self.order, share)
        if not self._is_endless:
            check_room(self.order, world_size, share)
