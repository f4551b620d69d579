"""A double for devices that a machine may not have."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phalanx.runtime import Fault, Gpu

if TYPE_CHECKING:
    from collections.abc import Mapping


class FakeGpus:
    """An inventory of *count* devices that no CUDA will ever find; see `GpuInventory`.

    Args:
        count: How many.
        instances: Into how many instances (MIG) each is cut up; 0 leaves them whole.

    Thread-safe. Device 0 is ``GPU-00000000-fake``, its instance 1 ``MIG-00000000-1-fake``.
    """

    def __init__(self, count: int, *, instances: int = 0) -> None:
        self._lock = threading.Lock()
        whole = tuple(Gpu(f"GPU-{at:08x}-fake", at, f"Fake {at}") for at in range(count))
        parts = tuple(
            Gpu(f"MIG-{at:08x}-{n}-fake", at * instances + n, f"Fake {at} MIG {n}", gpu.uuid)
            for at, gpu in enumerate(whole)
            for n in range(instances)
        )
        self._gpus = parts or whole
        self._used: dict[str, list[int | None]] = {gpu.uuid: [0] for gpu in self._gpus}
        self._processes: dict[str, dict[int, int | None] | None] = {}
        self._faults: dict[str, tuple[Fault, ...]] = {}
        self.closed = 0

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the devices."""
        return self._gpus

    def uuid(self, index: int) -> str:
        """Return what the device *index* is leased by."""
        return self._gpus[index].uuid

    def use(self, uuid: str, *used_bytes: int | None) -> None:
        """Answer the next questions for the memory in use so; the last for ever, None: an error."""
        with self._lock:
            self._used[uuid] = list(used_bytes)

    def hold(self, uuid: str, processes: Mapping[int, int | None] | None) -> None:
        """Let *processes* use a device, with so many bytes each; None: they are not known."""
        with self._lock:
            self._processes[uuid] = None if processes is None else dict(processes)

    def fail(self, uuid: str, *faults: Fault) -> None:
        """Give a device, or the GPU of an instance, these faults and no others."""
        with self._lock:
            self._faults[self._whole(uuid)] = faults

    def lose(self, uuid: str) -> None:
        """Let a device fall off the bus."""
        self.fail(uuid, Fault("lost", "NVML has lost it: GPU is lost", fatal=True))
        self.use(uuid, None)

    def report_xid(self, uuid: str, number: int, *, fatal: bool = False) -> None:
        """Let the driver report an Xid error, once more if it has reported it before."""
        with self._lock:
            whole, text = self._whole(uuid), f"Xid {number}: reported by a test"
            known = {fault.text: fault for fault in self._faults.get(whole, ())}
            count = known[text].count + 1 if text in known else 1
            known[text] = Fault("xid", text, fatal, count)
            self._faults[whole] = tuple(known.values())

    def heal(self, uuid: str) -> None:
        """Let a device have no faults and no users."""
        self.fail(uuid)
        self.hold(uuid, {})
        self.use(uuid, 0)

    def used_bytes(self, uuid: str) -> int | None:
        """Return what `use` said."""
        with self._lock:
            steps = self._used[uuid]
            return steps.pop(0) if len(steps) > 1 else steps[0]

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:
        """Return what `hold` said; None before."""
        with self._lock:
            return self._processes.get(uuid)

    def faults(self, uuid: str) -> tuple[Fault, ...]:
        """Return what `fail` and its like said."""
        with self._lock:
            return self._faults.get(self._whole(uuid), ())

    def close(self) -> None:
        """Count that it was closed."""
        self.closed += 1

    def _whole(self, uuid: str) -> str:
        return next((gpu.parent for gpu in self._gpus if gpu.uuid == uuid), "") or uuid
