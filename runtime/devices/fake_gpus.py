"""Doubles for what a machine may not have.

Guarantees: they keep the protocols of what they stand for, and can be told what to do.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from .gpu import Fault, Gpu

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
        numbers = range(count)
        whole = tuple(Gpu(f"GPU-{number:08x}-fake", number, f"Fake {number}") for number in numbers)
        cut = tuple(
            Gpu(
                f"MIG-{gpu.index:08x}-{number}-fake",
                gpu.index * instances + number,
                f"Fake {gpu.index} MIG {number}",
                gpu.uuid,
            )
            for gpu in whole
            for number in range(instances)
        )
        self._gpus = cut or whole
        self._used: dict[str, int | None] = dict.fromkeys((gpu.uuid for gpu in self._gpus), 0)
        self._steps: dict[str, list[int | None]] = {}
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
        """Let the questions to come be answered so, one after the other; the last for ever.

        None is the answer of an NVML that gives an error.
        """
        with self._lock:
            self._steps[uuid] = list(used_bytes[:-1])
            self._used[uuid] = used_bytes[-1]

    def hold(self, uuid: str, processes: Mapping[int, int | None] | None) -> None:
        """Let *processes* be those that use a device, with so many bytes each.

        The memory in use is a matter of its own: see `use`. None: nobody can say who they are.
        """
        with self._lock:
            self._processes[uuid] = None if processes is None else dict(processes)

    def fail(self, uuid: str, *faults: Fault) -> None:
        """Give a device these faults, and no others; for an instance: its GPU."""
        with self._lock:
            self._faults[self._whole(uuid)] = faults

    def lose(self, uuid: str) -> None:
        """Let a device fall off the bus: it does not answer any more."""
        self.fail(uuid, Fault("lost", "NVML has lost it: GPU is lost", fatal=True))
        self.use(uuid, None)

    def report_xid(self, uuid: str, number: int, *, fatal: bool = False) -> None:
        """Let the driver report an Xid error, one more if it has reported that one before."""
        with self._lock:
            whole = self._whole(uuid)
            there = self._faults.get(whole, ())
            fault = Fault("xid", f"Xid {number}: reported by a test", fatal)
            for known in there:
                if known.text == fault.text:
                    fault = replace(fault, count=known.count + 1)
            others = tuple(known for known in there if known.text != fault.text)
            self._faults[whole] = (*others, fault)

    def heal(self, uuid: str) -> None:
        """Let nothing be wrong with a device, and nobody use it."""
        self.fail(uuid)
        self.hold(uuid, {})
        self.use(uuid, 0)

    def used_bytes(self, uuid: str) -> int | None:
        """Return what `use` said."""
        with self._lock:
            steps = self._steps.get(uuid)
            return steps.pop(0) if steps else self._used[uuid]

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:
        """Return what `hold` said; at first that nobody can say."""
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
