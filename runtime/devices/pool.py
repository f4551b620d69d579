"""Device pool: acquires, releases and quarantines devices.

Who may use which device: leases from a pool.

Guarantees: no more of a device is leased than there is, and asking for more ranks than fit is
refused before any process starts; a worker sees the devices leased to it and, unless it asked for
all, no other; what a dead worker held is leased again only when its memory is seen to be released
(`slot`). Where that does not happen in time, or a device has a fault, the device is put aside: it
is leased again when what was wrong is over, or when the user says so. Several groups, and whole
trees, may share one pool.

Left to others: finding the devices and asking how they are (`inventory`); ending the worker before
its lease is given back; what a group does while no device is left (`phalanx.actors`).

CPU slots are devices like any other, except that there is nothing to measure.

The devices of one pool, in the order in which they are leased.

Guarantees: a device that was named twice is one slot that can be leased twice; one is found by its
name, its index, what CUDA calls it, or its UUID; what can never be had is refused with what there
is.

Left to others: locking, and who has which (`devices`); which is given to whom (`placement`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self, cast

from phalanx.supervision import SpecError

from .allocation import (
    Unplaced,
    add_cpu_slots,
    check_kinds,
    check_room,
    lease_of,
    nothing,
    place,
    there,
)
from .device import Leaving, Quarantine, Reading, Slot
from .gpu import named_gpus, select_gpu, visible
from .health import Ward
from .inventory import find_gpus
from .lease import Request, check_share

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from types import TracebackType

    from .device import DeviceStatus
    from .events import DeviceEvent
    from .gpu import Fault, Gpu, GpuInventory
    from .lease import Lease, Visibility


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


_LOOK_AGAIN = 0.02  # seconds; NVML has no event for memory that is released


class DevicePool:
    """The devices that the ranks of a group share out, or those of several groups. Thread-safe.

    Args:
        gpus: What can be leased, in the order in which it is. A device that stands here twice is
            leased twice. None for CPU slots.
        inventory: What measures them.
        slots: How many CPU slots there are; None for any number.
        release_timeout: Seconds that a dead worker's memory may take to be released, before the
            device is put aside.
        slack_bytes: Memory that may still be in use then: other users of a device come and go.
        tolerate: Given a `Fault`, says whether a device with it may be leased all the same. None
            tolerates none.

    A pool that several executors share lives until each of them has ended and `close` was called
    (or the ``with`` block left) by whoever made it.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu] | None,
        inventory: GpuInventory | None = None,
        *,
        slots: int | None = None,
        release_timeout: float = 10.0,
        slack_bytes: int = 64 << 20,
        tolerate: Callable[[Fault], bool] | None = None,
    ) -> None:
        _check_number("release_timeout", release_timeout, 0)
        _check_number("slack_bytes", slack_bytes, 0)
        if slots is not None:
            _check_number("slots", slots, 1)
        self._inventory = inventory
        self._release_timeout = release_timeout
        self._ward = Ward(inventory, slack_bytes, tolerate)
        self._lock = threading.RLock()
        self._holds = 1
        self._rack = Rack(gpus, slots)
        self._shown: tuple[DeviceStatus, ...] = ()
        self._show()

    @classmethod
    def of(
        cls,
        devices: Any,
        world_size: int,
        inventory: GpuInventory | None = None,
        environment: Mapping[str, str] = os.environ,
        *,
        devices_per_rank: float = 1,
        **options: Any,
    ) -> DevicePool:
        """Return a pool that has what each of *world_size* ranks needs.

        Args:
            devices: None or ``"auto"`` for the GPUs that are visible, or CPU slots where there are
                none; ``"cpu"``; ``"cuda"`` for GPUs or an error; a list that names each device, by
                index, ``"cuda:1"`` or UUID; or a pool that several groups share.
            world_size: How many ranks there will be.
            inventory: The machine's devices; None looks for them.
            environment: Where ``CUDA_VISIBLE_DEVICES`` is looked up.
            devices_per_rank: How many devices each rank gets, or which part of one.
            options: Those of the constructor.

        Raises:
            SpecError: There are fewer devices than ranks, or none of that name.
        """
        check_share(devices_per_rank)
        if isinstance(devices, DevicePool):
            pool = devices
            pool._rack.check(world_size, devices_per_rank)  # noqa: SLF001  # one of us
            pool._hold()  # noqa: SLF001  # the same
            return pool
        if devices == "cpu":
            return cls(None, **options)
        own = inventory is None
        inventory = find_gpus() if inventory is None else inventory
        try:
            seen = visible(inventory.gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
            if not seen and devices in (None, "auto"):
                if own:
                    inventory.close()
                return cls(None, **options)
            if devices in (None, "auto", "cuda"):
                pool = cls(seen, inventory, **options)
            else:
                pool = cls(named_gpus(devices, seen), inventory, **options)
            pool._rack.place(seen)
            pool._rack.check(world_size, devices_per_rank)
        except BaseException:
            if own:
                inventory.close()
            raise
        return pool

    # --- leasing --------------------------------------------------------------------------

    @property
    def size(self) -> int | None:
        """How many whole leases there can be at once; None for any number."""
        return self._rack.size

    @property
    def has_gpus(self) -> bool:
        """Whether there is anything to look after: CPU slots have no faults."""
        return any(slot.gpu is not None for slot in self._rack.slots())

    def acquire(
        self,
        rank: int,
        *,
        share: float = 1,
        visibility: Visibility = "one",
        holder: str = "",
        again: tuple[str, ...] = (),
    ) -> Lease:
        """Lease a device to *rank*: the one of that number where it is free, else the first.

        Args:
            rank: Decides between devices that are as good as each other.
            share: How many devices, or which part of one.
            visibility: ``"one"``: the worker sees what is leased to it, and nothing else;
                ``"all"``: it sees every device of the pool, each under the same name in every
                worker.
            holder: Who asks; shown to people.
            again: The names of the last lease's devices: they are given again if they are well,
                and waited for where their memory is just being released.

        Raises:
            NoDevice: There is none just now; it says who has which, and which are put aside.
        """
        return self.acquire_all([Request(rank, holder, again)], share, visibility)[0]

    def acquire_all(
        self, requests: Sequence[Request], share: float = 1, visibility: Visibility = "one"
    ) -> list[Lease]:
        """Lease devices for all of *requests*, or for none; see `acquire`."""
        check_share(share)
        with self._changing():
            self._look()
            self._rack.make_room(len(requests), share)
            placed = place(self._rack.order, requests, share)
            if isinstance(placed, Unplaced):
                raise nothing(self._rack.slots(), placed, share)
            seen = self._rack.slots() if visibility == "all" else None
            leases: list[Lease] = []
            for request, slots in zip(requests, placed, strict=True):
                for slot in slots:
                    if slot.gpu is not None and self._inventory is not None and not slot.given:
                        slot.idle = Reading.of(self._inventory, slot.gpu.uuid)
                lease = lease_of(request, slots, share, seen)
                for slot in slots:
                    slot.leases.append(lease)
                leases.append(lease)
            return leases

    def give_back(
        self, lease: Lease, pid: int | None = None, *, deadline: float | None = None
    ) -> None:
        """Take *lease* back; its devices are leased again once the worker's memory is released.

        Args:
            lease: A second time is none.
            pid: The process that held it, which is gone. This very process (an inline rank) keeps
                what it has, and nothing is waited for.
            deadline: When the devices are put aside if it is not, on the monotonic clock; None
                takes the pool's *release_timeout*.
        """
        if deadline is None:
            deadline = time.monotonic() + self._release_timeout
        with self._changing():
            for slot in self._rack.slots():
                if lease in slot.leases:
                    slot.leases.remove(lease)
                    if pid != os.getpid():
                        slot.leaving.append(Leaving(lease, pid, deadline))
            self._ward.watch_releases(self._rack.slots())

    def settle(self, leases: Iterable[Lease], deadline: float) -> bool:
        """Wait until what *leases* held is released; return whether it was.

        Args:
            leases: Ones given back.
            deadline: On the monotonic clock. A device that is put aside is waited for no more.
        """
        mine = set(leases)
        names = {name for lease in mine for name in lease.names}
        while True:
            with self._changing():
                self._ward.watch_releases(self._rack.slots())
                slots = [slot for slot in self._rack.slots() if slot.name in names]
                waits = any(one.lease in mine for slot in slots for one in slot.leaving)
                kept = [slot.quarantine for slot in slots if slot.quarantine is not None]
            if not waits:
                return not any(quarantine.cause == "memory" for quarantine in kept)
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_AGAIN)

    def release(self, lease: Lease, deadline: float, pid: int | None = None) -> bool:
        """Take *lease* back and wait until its memory is released.

        Returns False where it was not by *deadline*: then the device is put aside.
        """
        self.give_back(lease, pid, deadline=deadline)
        return self.settle([lease], deadline + self._release_timeout)

    # --- health ---------------------------------------------------------------------------

    @property
    def inventory(self) -> GpuInventory | None:
        """What measures the devices; None where there is nothing to measure."""
        return self._inventory

    def look(self) -> dict[Lease, str]:
        """Look how the devices are; return the leases that cannot go on, and why."""
        with self._changing():
            self._look()
            return {
                lease: f"device {slot.name}: {slot.quarantine.reason}"
                for slot in self._rack.slots()
                if slot.quarantine is not None and slot.quarantine.fatal
                for lease in slot.leases
            }

    def status(self) -> tuple[DeviceStatus, ...]:
        """Return what each device was when anybody last looked; asks no driver, never waits."""
        return self._shown

    def quarantine(self, device: int | str, reason: str) -> None:
        """Put a device aside until `restore`; who has a lease on it keeps that.

        Raises:
            SpecError: the pool has no such device.
        """
        with self._changing():
            slot = self._rack.find(device)
            slot.quarantine = None
            self._ward.put_aside(slot, Quarantine("user", reason, time.monotonic()))

    def restore(self, device: int | str) -> None:
        """Lease a device that was put aside again; the faults it has now are accepted.

        Raises:
            SpecError: the pool has no such device.
        """
        with self._changing():
            self._ward.accept(self._rack.find(device))

    def subscribe(
        self,
        listener: Callable[[DeviceEvent], None],
        log: Callable[[DeviceEvent], None] | None = None,
    ) -> Callable[[], None]:
        """Have *listener* told of every `DeviceQuarantined` and `DeviceRestored`.

        Args:
            listener: Called in whichever thread looked; must not block.
            log: Told as well, but once for each event, however many subscribers name it.

        Returns:
            What ends the subscription.
        """
        with self._lock:
            key = self._ward.subscribe(listener, log)

        def cancel() -> None:
            with self._lock:
                self._ward.unsubscribe(key)

        return cancel

    def close(self) -> None:
        """Let go of NVIDIA's driver, once everybody who shares the pool has."""
        with self._lock:
            self._holds = max(0, self._holds - 1)
            last = not self._holds
        if last and self._inventory is not None:
            self._inventory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------

    def _hold(self) -> None:
        with self._lock:
            self._holds += 1

    @contextlib.contextmanager
    def _changing(self) -> Generator[None]:
        """Hold the lock; what has come of it is shown and told afterwards, outside of it."""
        news: list[DeviceEvent] = []
        listeners: list[Callable[[DeviceEvent], None]] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    self._show()
                    news, listeners = self._ward.news()
        finally:
            # Also where there is no device: what was found on the way there is the reason.
            for event in news:
                for listener in listeners:
                    listener(event)

    def _show(self) -> None:
        self._shown = tuple(slot.status() for slot in self._rack.slots())

    def _look(self) -> None:
        slots = self._rack.slots()
        self._ward.watch_releases(slots)
        self._ward.examine(slots)


def _check_number(field: str, value: object, least: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not cast("float", value) >= least:
        raise SpecError(field, value, f"give a number of at least {least:g}")
