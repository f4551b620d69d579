"""Which GPUs this machine has, without a CUDA context.

Guarantees: asking never initialises CUDA, which would make every fork from here on unsafe; the
driver's own ``CUDA_VISIBLE_DEVICES`` counts; a machine without NVIDIA's driver has no GPUs, which
is an answer and not an error.

Left to others: who may use which (`devices`).

Source: NVML through ``nvidia-ml-py`` where that is installed, else the driver's files in /proc.
Both list devices in the order of their PCI addresses.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_PROC = Path("/proc/driver/nvidia")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device.

    Attributes:
        uuid: What it is leased by: indices change with ``CUDA_VISIBLE_DEVICES``.
        index: Its place in the order of PCI addresses.
    """

    uuid: str
    index: int
    name: str = ""


class GpuInventory(Protocol):
    """The machine's devices, and what can be measured of them."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device, in the order of their PCI addresses."""
        ...

    def used_bytes(self, uuid: str) -> int | None:
        """Return the memory in use on a device; None where that cannot be measured."""
        ...

    def close(self) -> None:
        """Let go of the driver; the next question opens it again."""
        ...


class NvmlInventory:
    """Asks NVML. *nvml* is the module ``pynvml``, or what behaves like it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._open = False

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device; none where NVML finds no driver."""
        return self._ask(self._list, ())

    def used_bytes(self, uuid: str) -> int | None:
        """Return the memory in use on the device *uuid*."""
        return self._ask(lambda: self._used(uuid), None)

    def close(self) -> None:
        """Let go of the driver."""
        if self._open:
            self._open = False
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _list(self) -> tuple[Gpu, ...]:
        nvml = self._nvml
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return tuple(
            Gpu(_text(nvml.nvmlDeviceGetUUID(handle)), index, _text(nvml.nvmlDeviceGetName(handle)))
            for index, handle in enumerate(handles)
        )

    def _used(self, uuid: str) -> int:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)

    def _ask(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        try:
            if not self._open:
                self._nvml.nvmlInit()
                self._open = True
            return question()
        except self._nvml.NVMLError:
            return otherwise


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
    return inventory if inventory.gpus() else ProcInventory()


def visible(gpus: Sequence[Gpu], mask: str | None) -> tuple[Gpu, ...]:
    """Return those of *gpus* that ``CUDA_VISIBLE_DEVICES=mask`` leaves, in its order.

    As in CUDA, the list ends at the first entry that names no device, and the start of a UUID will
    do. None leaves all. Indices are taken in PCI order: where the models differ, CUDA agrees only
    under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    if mask is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in mask.split(","):
        gpu = select_gpu(gpus, entry.strip())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return tuple(chosen)


def select_gpu(gpus: Iterable[Gpu], name: str) -> Gpu | None:
    """Return the device called *name*: an index, ``cuda:<index>``, or how one UUID starts."""
    name = name.removeprefix("cuda:")
    if name.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(name)), None)
    matches = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


_Answer = TypeVar("_Answer")


def _text(value: str | bytes) -> str:
    # nvidia-ml-py before 11.5 returned bytes.
    return value.decode() if isinstance(value, bytes) else value
