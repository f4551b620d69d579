"""Device pool: leases devices to ranks, takes them back, and watches their health.

Guarantees: no more of a device is leased than there is; more ranks than fit are refused before any
process starts; a worker sees the devices leased to it and, unless it asked for all, no other; a
dead worker's device is leased again once its memory is released (`device`), or another if it is in
quarantine by then. A device with a fault that is not tolerated, or whose memory a dead worker still
holds, is in quarantine until that is over; each change is reported once to every subscriber.
Several groups, and whole trees, may share one pool.

A pool of CPU slots has no devices: all its leases are equal and always available.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

from phalanx.supervision import SpecError, check_callable, check_number, check_seconds

from .allocation import (
    Lease,
    Request,
    Visibility,
    check_room,
    check_share,
    lease_of,
    names_of,
    place,
)
from .device import (
    Device,
    DeviceEvent,
    DeviceQuarantined,
    DeviceRestored,
    DeviceStatus,
    Leaving,
    Quarantine,
    Reading,
)
from .inventory import Fault, Gpu, GpuInventory, find_gpus, named_gpus, select_gpu, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    Listener = Callable[[DeviceEvent], None]
    Tolerance = Callable[[Fault], bool]

_POLL = 0.02  # seconds; NVML has no event for memory that is released


class DevicePool:
    """The devices that the ranks of a group share out, or those of several groups. Thread-safe.

    Args:
        gpus: The devices, in the order in which they are leased. A device that stands here twice
            is leased twice. None for CPU slots.
        inventory: Tells their memory and faults; None if nothing does.
        release_timeout: Seconds that a dead worker's memory may take to be released, before the
            device is put into quarantine. The default is three times the worst of docs/gpu.md.
        slack_bytes: Memory that may still be in use then: other users of a device come and go.
        tolerate: Called with a `phalanx.runtime.Fault`, returns whether a device that has it may
            be leased all the same. None tolerates none.

    A pool that several executors share lives until each of them has ended and its maker has called
    `close` (or left the ``with`` block).
    """

    def __init__(
        self,
        gpus: Sequence[Gpu] | None,
        inventory: GpuInventory | None = None,
        *,
        release_timeout: float = 10.0,
        slack_bytes: int = 64 << 20,
        tolerate: Tolerance | None = None,
    ) -> None:
        check_seconds("release_timeout", release_timeout, finite=False)
        check_number("slack_bytes", slack_bytes)
        if tolerate is not None:
            check_callable("tolerate", tolerate)
        self._inventory = inventory
        self._release_timeout = release_timeout
        self._slack = slack_bytes
        self._tolerate = tolerate
        self._news: list[DeviceEvent] = []
        self._subscriptions: dict[object, tuple[Listener, ...]] = {}
        self._lock = threading.RLock()
        self._users = 1
        self._order: list[Device] = []
        devices: dict[str, Device] = {}
        for number, gpu in enumerate(gpus or ()):
            device = devices.get(gpu.uuid)
            if device is None:
                device = devices[gpu.uuid] = Device(gpu, f"cuda:{number}")
            else:
                device.capacity += 1
            self._order.append(device)
        self._devices = list(devices.values())
        self._is_cpu = gpus is None
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
            devices: None or ``"auto"`` for the GPUs that are visible, or CPU slots if there are
                none; ``"cpu"``; ``"cuda"`` for GPUs or an error; a list that names each device, by
                index, ``"cuda:1"`` or UUID; or a pool that several groups share.
            inventory: The machine's devices; None looks for them.
            environment: ``CUDA_VISIBLE_DEVICES`` is looked up here.
            devices_per_rank: How many devices each rank gets, or which part of one.
            options: Those of the constructor.

        Raises:
            SpecError: There are fewer devices than ranks, or none of that name.
        """
        check_share(devices_per_rank)
        if isinstance(devices, DevicePool):
            devices._check(world_size, devices_per_rank)  # noqa: SLF001  # of this class
            with devices._lock:  # noqa: SLF001  # the same
                devices._users += 1  # noqa: SLF001  # the same
            return devices
        if devices == "cpu":
            return cls(None, **options)
        with contextlib.ExitStack() as failed:
            if inventory is None:
                inventory = find_gpus()
                failed.callback(inventory.close)
            seen = visible(inventory.gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
            if not seen and devices in (None, "auto"):
                return cls(None, **options)
            wanted = seen if devices in (None, "auto", "cuda") else named_gpus(devices, seen)
            pool = cls(wanted, inventory, **options)
            for device in pool._devices:
                device.place = f"cuda:{seen.index(device.gpu)}"
            pool._check(world_size, devices_per_rank)
            failed.pop_all()
        return pool

    # --- leasing --------------------------------------------------------------------------

    @property
    def has_gpus(self) -> bool:
        """Whether there are devices whose health is to be watched."""
        return bool(self._devices)

    def acquire(
        self, requests: Sequence[Request], share: float = 1, visibility: Visibility = "one"
    ) -> list[Lease]:
        """Lease devices for all of *requests*, or for none.

        Args:
            share: How many devices each gets, or which part of one.
            visibility: ``"one"``: the worker sees only what is leased to it; ``"all"``: it sees
                every device of the pool, each under the same name in every worker.

        Raises:
            NoDevice: There is none now; it names the holders, and the devices in quarantine.
        """
        check_share(share)
        if self._is_cpu:
            return [Lease.cpu(request.holder, max(1, int(share))) for request in requests]
        with self._changing():
            self._look()
            placed = place(self._order, requests, share)
            seen = self._devices if visibility == "all" else None
            leases: list[Lease] = []
            for request, devices in zip(requests, placed, strict=True):
                for device in devices:
                    if self._inventory is not None and not device.leased:
                        device.idle = Reading.of(self._inventory, device.uuid)
                lease = lease_of(request, devices, share, seen)
                for device in devices:
                    device.leases.append(lease)
                leases.append(lease)
            return leases

    def give_back(self, lease: Lease, pid: int | None = None) -> None:
        """Take *lease* back; its devices are leased again once the worker's memory is released.

        Args:
            lease: Ignored if it has been given back before.
            pid: The process that held it, which is dead. For this very process (an inline rank)
                no release is waited for.
        """
        deadline = time.monotonic() + self._release_timeout
        with self._changing():
            for device in self._devices:
                if lease in device.leases:
                    device.leases.remove(lease)
                    if self._inventory is not None and pid != os.getpid():
                        device.leaving.append(Leaving(lease, pid, deadline))
            self._watch_releases()

    def is_releasing(self, lease: Lease) -> bool:
        """Whether *lease* was given back, and its memory is not seen to be released yet."""
        with self._lock:
            return any(one.lease is lease for device in self._devices for one in device.leaving)

    def settle(self, leases: Iterable[Lease], deadline: float) -> bool:
        """Wait until the memory of *leases*, which were given back, is released.

        Returns False if it was not by *deadline*, on the monotonic clock, or if a device of theirs
        went into quarantine for it.
        """
        mine = set(leases)
        names = {name for lease in mine for name in lease.names}
        while True:
            with self._changing():
                self._watch_releases()
                devices = [device for device in self._devices if device.uuid in names]
                waits = any(one.lease in mine for device in devices for one in device.leaving)
                kept = [device.quarantine for device in devices if device.quarantine is not None]
            if not waits:
                return not any(quarantine.cause == "memory" for quarantine in kept)
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)

    # --- health ---------------------------------------------------------------------------

    def look(self) -> dict[Lease, str]:
        """Examine the devices; return the leases that cannot go on, and why."""
        with self._changing():
            self._look()
            return {
                lease: f"device {device.uuid}: {device.quarantine.reason}"
                for device in self._devices
                if device.quarantine is not None and device.quarantine.fatal
                for lease in device.leases
            }

    def status(self) -> tuple[DeviceStatus, ...]:
        """Return the devices as of the last look; does not block. CPU slots are not listed."""
        return self._shown

    def quarantine(self, device: int | str, reason: str) -> None:
        """Do not lease a device until `restore`; present holders keep their leases.

        Raises:
            SpecError: the pool has no such device.
        """
        with self._changing():
            self._put_aside(self._find(device), Quarantine("user", reason, time.monotonic()))

    def restore(self, device: int | str) -> None:
        """Take a device out of quarantine; the faults it has now are accepted.

        Raises:
            SpecError: the pool has no such device.
        """
        with self._changing():
            found = self._find(device)
            if self._inventory is not None:
                found.accepted |= frozenset(found.faults(self._inventory, None))
            if found.quarantine is not None:
                self._put_back(found, found.quarantine, "user")

    def subscribe(self, *listeners: Listener) -> Callable[[], None]:
        """Call *listeners* with every `DeviceQuarantined` and `DeviceRestored`.

        They are called on the thread that looked, and must not block. One that raises is reported
        by `threading.excepthook`. One that several subscriptions name is called once for each
        event. Returns what ends the subscription.
        """
        key = object()
        with self._lock:
            self._subscriptions[key] = listeners

        def cancel() -> None:
            with self._lock:
                self._subscriptions.pop(key, None)

        return cancel

    def close(self) -> None:
        """Close the inventory, once every user of the pool has closed it."""
        with self._lock:
            self._users = max(0, self._users - 1)
            last = not self._users
        if last and self._inventory is not None:
            self._inventory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------

    def _check(self, world_size: int, share: float) -> None:
        if not self._is_cpu:
            check_room(self._order, world_size, share)

    def _find(self, device: int | str) -> Device:
        gpus = [known.gpu for known in self._devices]
        gpu = None if isinstance(device, bool) else select_gpu(gpus, str(device))
        for known in self._devices:
            if device == known.uuid or known.gpu == gpu:
                return known
        raise SpecError("device", device, f"not in this pool, which has {names_of(self._order)}")

    @contextlib.contextmanager
    def _changing(self) -> Generator[None]:
        """Hold the lock; publish the status and the events afterwards, outside of it."""
        news: list[DeviceEvent] = []
        listeners: dict[Listener, None] = {}
        try:
            with self._lock:
                try:
                    yield
                finally:
                    self._show()
                    news, self._news = self._news, []
                    listeners = dict.fromkeys(chain(*self._subscriptions.values()))
        finally:
            # Also after an error: an event may be the reason for it.
            for event in news:
                for listener in listeners:
                    try:
                        listener(event)
                    except Exception as error:  # noqa: BLE001  # no lease depends on it
                        failed = type(error), error, error.__traceback__, None
                        threading.excepthook(threading.ExceptHookArgs(failed))

    def _show(self) -> None:
        self._shown = tuple(device.status() for device in self._devices)

    def _look(self) -> None:
        """Put faulty devices into quarantine, and take out those that are well again."""
        self._watch_releases()
        if self._inventory is None:
            return
        for device in self._devices:
            held = device.quarantine
            faults = device.faults(self._inventory, self._tolerate)
            if faults:
                reason = "; ".join(fault.text for fault in faults)
                fatal = any(fault.fatal for fault in faults)
                if held is None or (fatal and not held.fatal):
                    found = Quarantine("fault", reason, time.monotonic(), fatal=fatal)
                    if held is not None:  # what it waits for remains
                        reason = f"{held.reason}; {reason}"
                        found = replace(held, reason=reason, since=found.since, fatal=fatal)
                    self._put_aside(device, found)
            elif held is not None and (
                held.cause == "fault"
                or (held.cause == "memory" and device.is_released(self._inventory, self._slack))
            ):
                self._put_back(device, held, "recovered")

    def _watch_releases(self) -> None:
        """Drop what is released; put devices into quarantine whose deadline has passed."""
        now = time.monotonic()
        for device in self._devices:
            if not device.leaving:
                continue
            assert self._inventory is not None
            found = device.watch_release(self._inventory, self._slack, now)
            held = device.quarantine
            if found is not None and held is None:
                self._put_aside(device, found)
            elif found is not None and held is not None and held.cause != "user":
                reason, dead = f"{held.reason}; {found.reason}", held.dead | found.dead
                device.quarantine = replace(held, cause="memory", reason=reason, dead=dead)

    def _put_aside(self, device: Device, quarantine: Quarantine) -> None:
        device.quarantine = quarantine
        self._news.append(
            DeviceQuarantined(
                device=device.uuid,
                name=device.gpu.name,
                cause=quarantine.cause,
                reason=quarantine.reason,
                fatal=quarantine.fatal,
                holders=tuple(lease.holder for lease in device.leases),
                at=quarantine.since,
            )
        )

    def _put_back(
        self, device: Device, held: Quarantine, why: Literal["recovered", "user"]
    ) -> None:
        device.quarantine = None
        device.releasing_bytes = 0
        now = time.monotonic()
        self._news.append(
            DeviceRestored(
                device=device.uuid,
                name=device.gpu.name,
                cause=held.cause,
                why=why,
                after=now - held.since,
                at=now,
            )
        )
