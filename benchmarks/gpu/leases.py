"""E4: leases on a device that a process beside us uses as well.

- ``beside``: it takes memory while a rank has the device; the rank's lease is given back. NVML
  lists whose memory it is, so that the device is free.
- ``unlisted``: the same where NVML lists no processes, as in many containers: the device is put
  aside until that memory is free.
- ``residue``: a child of the rank lives on with its descriptors, and so with its memory: the lease
  must not be given again before that child ends.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from phalanx.errors import NoDevice
from phalanx.runtime import DevicePool, Gpu, Request, find_gpus

from .device import GIB, MIB, Holder, allocate, fork_idle_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime import Fault, GpuInventory

    from .record import Record

_RELEASE = 1.0  # seconds that a dead rank's memory may take here


def run(record: Record) -> None:
    """Run each case a few times."""
    sizes = record.choose((4 * GIB, 20 * GIB), (100 * MIB, 200 * MIB))
    for number in range(record.choose(5, 1)):
        if record.has_time(40.0):
            record.add("beside", round=number, **_beside(record, *sizes))
            record.add("unlisted", round=number, **_beside(record, *sizes, listed=False))
            record.add("residue", round=number, **_residue(record, sizes[0]))


def _holder(record: Record, size: int, *, with_child: bool = False) -> tuple[Holder, list[str]]:
    device = record.device

    def task(tell: Callable[[str], None]) -> Any:
        held = allocate(device, size)
        if with_child:
            tell(f"child {fork_idle_child()}")
        tell("ready")
        return held

    holder = Holder(task)
    said = [holder.line()]
    if with_child:
        said.append(holder.line())
    return holder, said


def _pool(record: Record, *, listed: bool = True) -> DevicePool:
    inventory: GpuInventory = _HostInventory(record) if record.rehearsal else find_gpus()
    if not listed:
        inventory = _Unlisted(inventory)
    environment = dict[str, str]() if record.rehearsal else os.environ
    release = record.choose(_RELEASE, 0.5)
    return DevicePool.of("cuda", 1, inventory, environment, release_timeout=release)


def _beside(record: Record, own: int, foreign: int, *, listed: bool = True) -> dict[str, Any]:
    """Return what becomes of the device when a rank ends while a stranger has grown."""
    with _pool(record, listed=listed) as pool:
        lease = pool.acquire([Request(0, "e4/0")])[0]
        rank, said = _holder(record, own)
        with rank:
            other, _ = _holder(record, foreign)
            with other:
                at = rank.signal(signal.SIGKILL)
                rank.gone(at)
                pool.give_back(lease, rank.pid)
                settled = pool.settle([lease], time.monotonic() + 15.0)
                after = time.monotonic() - at
                found = {"said": said, "settled": settled, "after": after, **_state(pool)}
                found["again"] = _ask(pool)
            found["restored_after"] = _restored(pool)
    return found


def _residue(record: Record, size: int) -> dict[str, Any]:
    """Return what becomes of it when a rank's child keeps the memory, and then ends."""
    with _pool(record) as pool:
        lease = pool.acquire([Request(0, "e4/0")])[0]
        rank, said = _holder(record, size, with_child=True)
        child = next(int(line.split()[1]) for line in said if line.startswith("child"))
        with rank:
            try:
                at = rank.signal(signal.SIGKILL)
                rank.gone(at)
                pool.give_back(lease, rank.pid)
                settled = pool.settle([lease], time.monotonic() + 15.0)
                found = {"settled": settled, "after": time.monotonic() - at, **_state(pool)}
                found["again"] = _ask(pool)
            finally:
                os.kill(child, signal.SIGKILL)
            found["restored_after"] = _restored(pool)
    return found


def _state(pool: DevicePool) -> dict[str, Any]:
    status = pool.status()[0]
    return {"state": status.state, "reason": status.reason}


def _ask(pool: DevicePool) -> str:
    """Return what a request gets now."""
    try:
        pool.give_back(pool.acquire([Request(0, "e4/1")])[0], os.getpid())
    except NoDevice as none:
        return str(none)
    return "a lease"


def _restored(pool: DevicePool) -> float | None:
    """Return the seconds until the device is leased again; None if it is not within 15."""
    began = time.monotonic()
    while time.monotonic() - began < 15.0:
        if _ask(pool) == "a lease":
            return time.monotonic() - began
        time.sleep(0.01)  # a pool looks when it is asked
    return None


class _Unlisted:
    """What *inner* finds, but for whose memory it is: as in many containers."""

    def __init__(self, inner: GpuInventory) -> None:
        self.gpus, self.used_bytes = inner.gpus, inner.used_bytes
        self.faults, self.close = inner.faults, inner.close

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:  # noqa: ARG002  # a protocol's
        return None


class _HostInventory:
    """One device, whose memory is that of our processes."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._gpu = Gpu("GPU-rehearsal", 0, "none")

    def gpus(self) -> tuple[Gpu, ...]:
        return (self._gpu,)

    def used_bytes(self, uuid: str) -> int | None:  # noqa: ARG002  # there is one
        return self._record.meter.used()

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:  # noqa: ARG002  # the same
        return None

    def faults(self, uuid: str) -> tuple[Fault, ...]:  # noqa: ARG002  # the same
        return ()

    def close(self) -> None:
        pass


if TYPE_CHECKING:
    _is_one: type[GpuInventory] = _HostInventory
