"""Doubles for what a machine may not have.

Guarantees: they keep the protocols of what they stand for, and can be told what to do.
"""

from __future__ import annotations

from .gpus import Gpu


class FakeGpus:
    """An inventory of *count* devices that no CUDA will ever find; see `GpuInventory`."""

    def __init__(self, count: int) -> None:
        self._gpus = tuple(
            Gpu(f"GPU-{index:08x}-fake", index, f"Fake {index}") for index in range(count)
        )
        self._used: dict[str, int] = dict.fromkeys((gpu.uuid for gpu in self._gpus), 0)
        self._steps: dict[str, list[int]] = {}
        self.closed = 0

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the devices."""
        return self._gpus

    def use(self, uuid: str, *used_bytes: int) -> None:
        """Let the questions to come be answered so, one after the other; the last for ever."""
        self._steps[uuid] = list(used_bytes[:-1])
        self._used[uuid] = used_bytes[-1]

    def used_bytes(self, uuid: str) -> int | None:
        """Return what `use` said."""
        steps = self._steps.get(uuid)
        return steps.pop(0) if steps else self._used[uuid]

    def close(self) -> None:
        """Count that it was closed."""
        self.closed += 1
