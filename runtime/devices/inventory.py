"""Whom to ask about this machine's GPUs: NVML, else the driver's files in /proc.

Guarantees: what can be asked without CUDA is asked without CUDA. A machine without NVIDIA's driver
has no GPUs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .gpu import Fault, Gpu
from .nvml import NvmlInventory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .gpu import GpuInventory

_PROC = Path("/proc/driver/nvidia")


class ProcInventory:
    """Reads what the kernel module tells of itself; it does not tell of memory."""

    def __init__(self, root: Path = _PROC) -> None:
        self._root = root

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device; none where the kernel module is not loaded."""
        found: list[dict[str, str]] = []
        # The folders are named for the PCI addresses, at fixed width: sorted is in their order.
        for path in sorted(self._root.glob("gpus/*/information")):
            lines = (line.partition(":") for line in path.read_text().splitlines())
            about = {key.strip(): value.strip() for key, _, value in lines}
            if about.get("GPU UUID", "").startswith("GPU-"):
                found.append(about)
        return tuple(
            Gpu(about["GPU UUID"], index, about.get("Model", ""))
            for index, about in enumerate(found)
        )

    def used_bytes(self, uuid: str) -> int | None:  # noqa: ARG002  # the protocol's
        """Return None: it cannot be measured from here."""
        return None

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:  # noqa: ARG002  # as above
        """Return None: it cannot be told from here."""
        return None

    def faults(self, uuid: str) -> tuple[Fault, ...]:
        """Say whether the device has gone; more cannot be told from here."""
        if any(gpu.uuid == uuid for gpu in self.gpus()):
            return ()
        return (Fault("lost", "its driver does not list it any more", fatal=True),)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def find_gpus() -> GpuInventory:
    """Return the inventory of this machine."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return ProcInventory()
    inventory = NvmlInventory(nvml)
    # A container may have the devices and their files, but not the library.
    if inventory.gpus():
        return inventory
    inventory.close()
    return ProcInventory()
