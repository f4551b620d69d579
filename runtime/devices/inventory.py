"""Inventory of this machine's GPUs: NVML, else the driver's files in /proc; never CUDA.

A CUDA context in the driver would make every later fork unsafe. A machine without NVIDIA's driver
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
    """Reads the files of the kernel module, which know nothing of memory."""

    def __init__(self, root: Path = _PROC) -> None:
        self._root = root

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device; none if the kernel module is not loaded."""
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
        """Return None: it is not known here."""
        return None

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:  # noqa: ARG002  # as above
        """Return None: they are not known here."""
        return None

    def faults(self, uuid: str) -> tuple[Fault, ...]:
        """Return a fault if the device is not listed any longer."""
        if any(gpu.uuid == uuid for gpu in self.gpus()):
            return ()
        return (Fault("lost", "its driver no longer lists it", fatal=True),)

    def close(self) -> None:
        """Do nothing."""


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
