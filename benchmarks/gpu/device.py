"""The memory of the device by NVML, in a rehearsal that of our processes; those that hold it.

A holder is forked from this process, which has imported torch and not started CUDA: a start takes
what CUDA takes, and not the import. So an experiment that has holders uses CUDA in them alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, Self

from phalanx.runtime import find_gpus, procfs, visible

if TYPE_CHECKING:
    from collections.abc import Callable

MIB, GIB = 1 << 20, 1 << 30
SLACK = 64 * MIB  # as the pool's default
_START = 60.0  # seconds for a holder to have its memory
NCCL_ON_ONE_GPU = {
    # NCCL refuses two ranks on one GPU by (host, GPU); so each gets another host.
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


def rank_environment(ranks: int) -> list[dict[str, str]]:
    """Return what each rank needs beside `NCCL_ON_ONE_GPU`."""
    return [{"NCCL_HOSTID": f"phalanx-{rank}"} for rank in range(ranks)]


class Meter(Protocol):
    """The memory of one device."""

    def used(self) -> int:
        """Return the bytes in use."""
        ...

    def pids(self) -> list[int]:
        """Return the processes that use it, as far as they are shown."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what the device is."""
        ...

    def settle(self, idle: int, limit: float) -> float | None:
        """Wait until no more than *idle* is in use; return the seconds, None past *limit*."""
        ...


class _Meter:
    def used(self) -> int:
        raise NotImplementedError

    def settle(self, idle: int, limit: float) -> float | None:
        """Poll each millisecond."""
        began = time.monotonic()
        while self.used() > idle + SLACK:
            if time.monotonic() - began > limit:
                return None
            time.sleep(0.001)  # NVML has no event for it
        return time.monotonic() - began


class NvmlMeter(_Meter):
    """The first GPU that CUDA_VISIBLE_DEVICES leaves."""

    def __init__(self) -> None:
        self.nvml: Any = import_module("pynvml")
        self.nvml.nvmlInit()
        inventory = find_gpus()
        gpus = inventory.gpus()
        inventory.close()
        chosen = visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES") or None)
        self.handle = self.nvml.nvmlDeviceGetHandleByUUID(chosen[0].uuid)

    def used(self) -> int:
        """Return the bytes in use."""
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def pids(self) -> list[int]:
        """Return the processes that NVML lists."""
        running = self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        return [int(each.pid) for each in running]

    def describe(self) -> dict[str, Any]:
        """Return names, versions and modes; a question that fails is answered by its error."""
        nvml, handle = self.nvml, self.handle
        questions: dict[str, Callable[[], Any]] = {
            "gpu": lambda: nvml.nvmlDeviceGetName(handle),
            "driver": nvml.nvmlSystemGetDriverVersion,
            "cuda_driver": nvml.nvmlSystemGetCudaDriverVersion_v2,
            "total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "gpus": nvml.nvmlDeviceGetCount,
            "mig": lambda: nvml.nvmlDeviceGetMigMode(handle)[0],
            "compute_mode": lambda: nvml.nvmlDeviceGetComputeMode(handle),
            "persistence": lambda: nvml.nvmlDeviceGetPersistenceMode(handle),
            "ecc": lambda: nvml.nvmlDeviceGetEccMode(handle)[0],
        }
        found: dict[str, Any] = {}
        for name, question in questions.items():
            try:
                found[name] = question()
            except nvml.NVMLError as error:
                found[name] = str(error)
        return found


class HostMeter(_Meter):
    """The memory of the processes that this one has started, in place of a device's."""

    def _resident(self) -> dict[int, int]:
        tasks = procfs.descendants(procfs.read_all(), [os.getpid()])
        found: dict[int, int] = {}
        for pid in tasks:
            statm = procfs.content(f"/proc/{pid}/statm")
            # Without what is shared: a forked holder has this process's torch.
            resident, shared = (int(n) for n in (statm or b"").split()[1:3] or (0, 0))
            found[pid] = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
        return found

    def used(self) -> int:
        """Return the bytes that they hold."""
        return sum(self._resident().values())

    def pids(self) -> list[int]:
        """Return those that hold more than a little."""
        return [pid for pid, size in self._resident().items() if size > SLACK]

    def describe(self) -> dict[str, Any]:
        """Return that it is none."""
        return {"gpu": None}


def find_meter(*, rehearsal: bool) -> Meter:
    """Return that of the GPU, or in a rehearsal its stand-in."""
    return HostMeter() if rehearsal else NvmlMeter()


class Holder:
    """A process that runs *task* on the device, says so, and then waits until it is ended.

    Args:
        task: Run in the process with a function that tells its parent a line; what it returns is
            kept alive.
    """

    def __init__(self, task: Callable[[Callable[[str], None]], Any]) -> None:
        import_module("torch")  # before the fork, or each would import it
        gc.freeze()
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _hold(task, writer)
        os.close(writer)
        self._reader = reader
        self.pidfd = os.pidfd_open(self.pid)
        self._text = ""

    def line(self, limit: float = _START) -> str:
        """Return the next line that it writes; empty if it has ended.

        Raises:
            TimeoutError: It wrote none within *limit* seconds.
        """
        until = time.monotonic() + limit
        while "\n" not in self._text:
            if not select.select([self._reader], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the holder {self.pid} has written nothing in {limit:g} s")
            data = os.read(self._reader, 1 << 16)
            if not data:
                return ""
            self._text += data.decode()
        line, _, self._text = self._text.partition("\n")
        return line

    def signal(self, number: int) -> float:
        """Send it a signal; return when."""
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
        return at

    def gone(self, since: float, limit: float = 10.0) -> float | None:
        """Return the seconds from *since* to its end; None if it lives *limit* seconds on."""
        if not select.select([self.pidfd], [], [], limit)[0]:
            return None
        return time.monotonic() - since

    def close(self) -> None:
        """Kill it and collect its exit status."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        os.close(self._reader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hold(task: Callable[[Callable[[str], None]], Any], writer: int) -> None:
    """In the holder: run *task*, wait for the end; never returns."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it may not outlive the experiment
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        kept = task(lambda line: (os.write(writer, f"{line}\n".encode()), None)[1])
        while kept is not NotImplemented:
            signal.pause()
        code = 0
    except BaseException as error:  # noqa: BLE001  # told to the parent
        text = str(error).replace("\n", " ")[:600]
        os.write(writer, f"error {type(error).__name__}: {text}\n".encode())
    os._exit(code)


def fork_idle_child() -> int:
    """Fork a child that has this process's descriptors and does nothing; return its pid."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def allocate(device: str, size: int) -> Any:
    """Return *size* bytes on *device*, written to."""
    torch: Any = import_module("torch")
    held = torch.empty(size, dtype=torch.uint8, device=device)
    held.fill_(1)
    synchronize(device)
    return held


def synchronize(device: str) -> None:
    """Wait until the device has done its work."""
    if device != "cpu":
        import_module("torch").cuda.synchronize()


def measure_release(meter: Meter, holder: Holder, idle: int, limit: float) -> dict[str, Any]:
    """SIGKILL *holder*; return the seconds until it is gone, and until its memory is free.

    Polls each millisecond; None for what has not come within *limit*.
    """
    peak = meter.used()
    at = holder.signal(signal.SIGKILL)
    gone: float | None = None
    first: float | None = None
    free: float | None = None
    polls = 0
    while free is None and time.monotonic() - at < limit:
        if gone is None and select.select([holder.pidfd], [], [], 0)[0]:
            gone = time.monotonic() - at
        used = meter.used()
        polls += 1
        if first is None and used < peak - SLACK:
            first = time.monotonic() - at
        if used <= idle + SLACK:
            free = time.monotonic() - at
        else:
            time.sleep(0.001)  # NVML has no event for it
    if gone is None:
        gone = holder.gone(at, 1.0)
    rest = meter.used() - idle
    return {"gone": gone, "first": first, "free": free, "rest_bytes": rest, "polls": polls}
