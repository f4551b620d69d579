"""Inventory of this machine's GPUs and their faults: by NVML, else by /proc; never by CUDA.

A GPU that is partitioned (MIG) is listed as its instances.

Guarantees: no CUDA context is created in the driver, which would make every later fork unsafe.
NVML's errors become answers ("cannot be measured", a fault), not exceptions; an NVML that hangs, as
it does on some failing devices, costs the caller a few seconds at most. Xid errors are collected
from the first query of faults on. A machine without NVIDIA's driver has no GPUs.

Source: NVIDIA's NVML reference, and its catalogue of Xid errors. Which Xids are the application's
own doing is taken from the Kubernetes device plugin.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from phalanx.runtime.threads.event_loop import resolve
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


_PROC = Path("/proc/driver/nvidia")
_QUERY_TIMEOUT = 5.0  # seconds for one question; a healthy driver answers within milliseconds
_Answer = TypeVar("_Answer")

# After these the device is as good as before; the program that caused them is not.
_APPLICATION_XIDS = frozenset((8, 11, 13, 31, 43, 45, 68, 109))
# After these nothing on the device goes on.
_FATAL_XIDS = frozenset((62, 79, 95, 119, 120, 140, 143))
_XID_NAMES = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor timed out",
    120: "error of the GPU's system processor",
    140: "ECC error that was not recovered",
    143: "the GPU could not be initialised",
}
# What `nvmlDeviceGetFieldValues` may ask for; the numbers are NVML's.
_RECOVERY_ACTIONS = {
    1: "a reset",
    2: "a reboot of the machine",
    3: "peer-to-peer traffic to be drained",
    4: "to be drained and reset",
    5: "a recovery of its IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
_MILD_ACTIONS = frozenset((3, 5))
_RECOVERY_ACTION_FIELD = 230


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
        kind: ``lost`` (it no longer answers), ``xid`` (an error that the driver reported),
            ``ecc`` (uncorrected memory errors), ``recovery`` (it needs a reset or a reboot),
            ``remap`` (its memory has no spare rows left) or ``unknown`` (NVML gave an error).
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
    """The machine's devices, and what can be measured of them: nothing, unless a class does."""

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device, in the order of their PCI addresses."""
        ...

    def used_bytes(self, uuid: str) -> int | None:  # noqa: ARG002
        """Return the bytes in use on a device; None if they cannot be measured."""
        return None

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:  # noqa: ARG002
        """Return the bytes in use by pid, None for a number unknown; None if there is no list.

        In a container the pids may be of another namespace, or only some of them.
        """
        return None

    def faults(self, uuid: str) -> tuple[Fault, ...]:
        """Return the known faults of a device, or of its GPU if it is an instance."""
        ...

    def close(self) -> None:
        """Close the connection to the driver; the next question opens it again."""
        return


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


class Unanswered(Exception):
    """The call did not return in time."""


class BoundedCaller:
    """Makes calls that may never return, one after the other, with a timeout. Thread-safe.

    Each runs on a daemon thread, which does not keep a program alive (`concurrent.futures` joins
    its threads at exit); if there is none, on that of its caller, without a timeout.
    """

    def __init__(self, name: str, limit: float) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._last: Future[Any] | None = None

    def call(self, function: Callable[[], _Answer]) -> _Answer:
        """Return what *function* returns, or raise what it raises.

        Raises:
            Unanswered: it, or others before it, took longer than the limit. While an earlier call
                has not returned, each one is refused at once.
        """
        until = time.monotonic() + self._limit
        if not self._lock.acquire(timeout=self._limit):
            raise Unanswered(f"other calls took {self._limit:g} s")
        result: Future[_Answer] = Future()
        try:
            if self._last is not None and not self._last.done():
                raise Unanswered("the call before is still without an answer")
            thread = threading.Thread(
                target=resolve, args=(result, function), name=self._name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # none to be had; by an exit handler never, since Python 3.12
                resolve(result, function)
            self._last = result
            wait([result], max(0.0, until - time.monotonic()))
        finally:
            if result.done():  # by the traceback of an error it would keep all its caller has
                self._last = None
            self._lock.release()
        if not result.done():
            raise Unanswered(f"no answer within {self._limit:g} s")
        try:
            return result.result()
        finally:
            del result  # likewise: this frame is in the traceback


class NvmlInventory(GpuInventory):
    """The inventory of NVML; *nvml* is the module ``pynvml`` or a double of it."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._caller = BoundedCaller("phalanx-nvml", _QUERY_TIMEOUT)
        self._open = False
        self._events: Any = None
        self._listening: set[str] = set()
        self._parents: dict[str, str] = {}
        self._xids: dict[str, dict[int, int]] = {}

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device; none if NVML finds no driver."""
        return self._ask(lambda: tuple(self._list()), ())

    def used_bytes(self, uuid: str) -> int | None:
        """Return the bytes in use on the device *uuid*; None if unknown."""
        nvml = self._nvml
        return self._ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(self._handle(uuid)).used), None)

    def processes(self, uuid: str) -> Mapping[int, int | None] | None:
        """Return the bytes in use by pid on the device *uuid*; None if unknown.

        Those of a pid that this namespace does not have are None: it may be a dead rank's, as the
        host knows it, so that its memory is not known to be another's.
        """

        def question() -> Mapping[int, int | None]:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle(uuid))
            sizes = {int(one.pid): one.usedGpuMemory for one in running}
            return {
                pid: int(size) if size is not None and Path(f"/proc/{pid}").exists() else None
                for pid, size in sizes.items()
            }

        return self._ask(question, None)

    def faults(self, uuid: str) -> tuple[Fault, ...]:
        """Return the faults of the device *uuid*, or of its GPU if it is an instance."""
        nvml = self._nvml
        try:
            return self._asked(lambda: tuple(self._faults(uuid)))
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_NotFound) as error:
            return (Fault("lost", f"NVML has lost it: {error}", fatal=True),)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_RESET_REQUIRED:
                return (Fault("recovery", "it wants a reset", fatal=True),)
            return (Fault("unknown", f"NVML: {error}"),)
        except Unanswered as error:
            return (Fault("unknown", f"NVML gives {error}"),)
        except Exception as error:  # noqa: BLE001  # the binding defines its own errors
            return (Fault("unknown", f"NVML's binding: {type(error).__name__}: {error}"),)

    def close(self) -> None:
        """Shut NVML down."""
        if self._open:
            with contextlib.suppress(self._nvml.NVMLError, Unanswered):
                self._caller.call(self._shut)
            self._open = False

    # --- on the thread of the call ------------------------------------------------------------

    def _list(self) -> Iterator[Gpu]:
        nvml = self._nvml
        index = 0
        for number in range(nvml.nvmlDeviceGetCount()):
            # It is counted too if it is lost, or not for this user or control group.
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                instances = list(self._instances(handle))
                for instance in instances:
                    name, own = nvml.nvmlDeviceGetName(instance), nvml.nvmlDeviceGetUUID(instance)
                    self._parents[own] = uuid
                    yield Gpu(own, index, name, uuid)
                    index += 1
                if not instances:
                    yield Gpu(uuid, index, nvml.nvmlDeviceGetName(handle))
                    index += 1

    def _instances(self, handle: Any) -> Iterator[Any]:
        """Yield the instances of a partitioned GPU (MIG)."""
        nvml = self._nvml
        try:
            if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                return
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:
            return
        for number in range(count):
            with contextlib.suppress(nvml.NVMLError):  # the count is an upper limit
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)

    def _faults(self, uuid: str) -> Iterator[Fault]:
        nvml = self._nvml
        uuid = self._parents.get(uuid, uuid)
        handle = self._handle(uuid)
        # Raises for a lost device; one that shares the machine's memory does not support it.
        self._try(lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
        self._listen(uuid, handle)
        self._read_xids()
        for number, count in self._xids.get(uuid, {}).items():
            name = _XID_NAMES.get(number, "see NVIDIA's catalogue of Xid errors")
            times = f", {count} times" if count > 1 else ""
            text = f"Xid {number}: {name}{times}"
            yield Fault("xid", text, number in _FATAL_XIDS, count)
        action = self._try(lambda: self._recovery_action(handle), 0)
        if action:
            wants = _RECOVERY_ACTIONS.get(action, f"recovery action {action}")
            yield Fault("recovery", f"it wants {wants}", action not in _MILD_ACTIONS)
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = self._try(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, *uncorrected)), 0)
        if errors:
            text = f"{errors} uncorrected ECC error(s) since its driver was loaded"
            yield Fault("ecc", text, count=errors)
        if self._try(lambda: nvml.nvmlDeviceGetRemappedRows(handle)[3], 0):
            yield Fault("remap", "its memory has no spare rows left")

    def _recovery_action(self, handle: Any) -> int:
        value = self._nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION_FIELD])[0]
        # A driver that does not know the field says so in the value.
        return int(value.value.uiVal) if value.nvmlReturn == 0 else 0

    def _listen(self, uuid: str, handle: Any) -> None:
        """Have NVML collect the Xid errors of a device from now on."""
        if uuid in self._listening:
            return
        nvml = self._nvml
        self._listening.add(uuid)
        with contextlib.suppress(nvml.NVMLError):  # some devices do not report any
            if self._events is None:
                self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)

    def _read_xids(self) -> None:
        """Read the Xid errors that NVML has collected."""
        nvml = self._nvml
        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = nvml.nvmlDeviceGetUUID(event.device)
            except nvml.NVMLError:  # a timeout: no more
                return
            number = int(event.eventData)
            if number not in _APPLICATION_XIDS:
                seen = self._xids.setdefault(uuid, {})
                seen[number] = seen.get(number, 0) + 1

    def _handle(self, uuid: str) -> Any:
        return self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def _try(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        """Return the answer, or *otherwise* if this device does not support the question."""
        nvml = self._nvml
        try:
            return question()
        except (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
        ):
            return otherwise

    def _shut(self) -> None:
        nvml = self._nvml
        events, self._events = self._events, None
        self._listening.clear()
        if events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)
        nvml.nvmlShutdown()

    # --- queries --------------------------------------------------------------------------

    def _ask(self, question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
        try:
            return self._asked(question)
        except Exception:  # noqa: BLE001  # the binding defines its own errors
            return otherwise

    def _asked(self, question: Callable[[], _Answer]) -> _Answer:
        def opened() -> _Answer:
            if not self._open:
                self._nvml.nvmlInit()
                self._open = True
            return question()

        return self._caller.call(opened)


class ProcInventory(GpuInventory):
    """Reads the files of the kernel module, which know nothing of memory."""

    def __init__(self, root: Path = _PROC) -> None:
        self._root = root

    def gpus(self) -> tuple[Gpu, ...]:
        """Return every device; none if the kernel module is not loaded.

        Raises:
            OSError: it cannot be seen, for no descriptor is free, say.
        """
        found: list[dict[str, str]] = []
        folders: list[Path] = []
        none = FileNotFoundError, PermissionError
        with contextlib.suppress(*none):
            # They are named for the PCI addresses, at fixed width: sorted is in their order.
            folders = sorted(self._root.joinpath("gpus").iterdir())
        for folder in folders:
            text = ""
            with contextlib.suppress(*none):  # it has just been lost
                text = folder.joinpath("information").read_text()
            lines = (line.partition(":") for line in text.splitlines())
            about = {key.strip(): value.strip() for key, _, value in lines}
            if about.get("GPU UUID", "").startswith("GPU-"):
                found.append(about)
        return tuple(
            Gpu(about["GPU UUID"], index, about.get("Model", ""))
            for index, about in enumerate(found)
        )

    def faults(self, uuid: str) -> tuple[Fault, ...]:
        """Return a fault if the device is not listed any longer."""
        try:
            if any(gpu.uuid == uuid for gpu in self.gpus()):
                return ()
        except OSError as error:  # no descriptor is free to look with
            return (Fault("unknown", f"/proc cannot be read: {error}"),)
        return (Fault("lost", "its driver no longer lists it", fatal=True),)


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
