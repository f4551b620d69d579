"""GPUs and their faults as values; what ``CUDA_VISIBLE_DEVICES`` and a user's list select.

A GPU that is partitioned (MIG) is listed as its instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: a GPU, or one instance of a GPU that is partitioned (MIG).

    Attributes:
        uuid: Its name in leases: indices change with ``CUDA_VISIBLE_DEVICES``.
        index: Its place in the order of PCI addresses.
        parent: The UUID of the GPU that it is an instance of; empty for a whole one.
    """

    uuid: str
    index: int
    name: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a device.

    Attributes:
        kind: ``lost`` (it does not answer any more), ``xid`` (an error that the driver reported),
            ``ecc`` (uncorrected memory errors), ``recovery`` (it needs a reset or a reboot),
            ``remap`` (its memory has no spare rows left) or ``unknown`` (NVML gave an error).
        text: The same in words.
        fatal: Whether the processes that use it cannot go on.
        count: How often it has occurred: one more is another fault.
    """

    kind: Literal["lost", "xid", "ecc", "recovery", "remap", "unknown"]
    text: str
    fatal: bool = False
    count: int = 1

    def __str__(self) -> str:
        return self.text


class GpuInventory(Protocol):
    """The machine's devices, and what can be measured of them."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device, in the order of their PCI addresses."""
        ...

    def used_bytes(self, uuid: str) -> int | None:
        """Return the bytes in use on a device; None if they cannot be measured."""
        ...

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:
        """Return the bytes in use by pid, None for a number unknown; None if there is no list.

        In a container the pids may be of another namespace, or only some of them.
        """
        ...

    def faults(self, uuid: str) -> tuple[Fault, ...]:
        """Return the known faults of a device."""
        ...

    def close(self) -> None:
        """Close the connection to the driver; the next question opens it again."""
        ...


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
    if not name.startswith(("GPU-", "MIG-")):
        return None
    matches = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def named_gpus(devices: object, there: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the devices that a list names, in its order.

    Raises:
        SpecError: it is no list, or names what is not there.
    """
    shown = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in there) or "no GPU is visible here"
    remedy = f"not a device; there is: {shown}; or 'auto', 'cpu', 'cuda', a list of these, a pool"
    if not isinstance(devices, list | tuple):
        raise SpecError("devices", devices, remedy)
    chosen: list[Gpu] = []
    for name in cast("Sequence[object]", devices):
        gpu = None
        if isinstance(name, int | str) and not isinstance(name, bool):
            gpu = select_gpu(there, str(name))
        if gpu is None:
            raise SpecError("devices", name, remedy)
        chosen.append(gpu)
    return tuple(chosen)
