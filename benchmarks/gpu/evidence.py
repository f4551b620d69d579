"""E0: versions; whether NVML knows our process ids; whether Xid events come; the tests on a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.machine import installed_version
from phalanx.runtime import DevicePool, Request, find_gpus

from .device import MIB, Holder, allocate
from .errors import trigger

if TYPE_CHECKING:
    from collections.abc import Callable

    from .record import Record

_PACKAGES = (
    *("torch", "nvidia-nccl-cu13", "nvidia-ml-py", "cuda-bindings", "transformers", "pyzmq"),
    *("pykka", "structlog", "cloudpickle", "triton"),
)


def run(record: Record) -> None:
    """Find out what evidence there is on this machine."""
    record.set(packages={name: installed_version(name) for name in _PACKAGES})
    record.set(torch=_about_torch(), pid_namespace=_namespace(), kernel_log=_kernel_log())
    record.set(processes=_processes(record))
    record.set(inventory=_inventory(record))
    record.set(xid=_xid(record))
    record.set(tests=_tests(record))


def _about_torch() -> dict[str, Any]:
    torch: Any = import_module("torch")
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {"version": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def _namespace() -> list[str]:
    """Return our pids in each namespace: more than one means a container's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1:] for line in lines if line.startswith("NSpid"))


def _kernel_log() -> str:
    """Return how the kernel's log answers: Xid errors are in it."""
    try:
        reader = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return str(error)
    lines: list[str] = []
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        while line := os.read(reader, 1 << 13).decode(errors="replace"):
            lines += [line.strip()] if "NVRM" in line else []
    os.close(reader)
    return "\n".join(lines[-5:]) or "no line of NVRM"


def _processes(record: Record) -> dict[str, Any]:
    """Hold memory in one process; return whether NVML lists it by the pid that we know."""
    device = record.device

    def task(tell: Callable[[str], None]) -> Any:
        held = allocate(device, 256 * MIB)
        tell("ready")
        return held

    before = record.meter.used()
    with Holder(task) as holder:
        said = holder.line()
        listed = record.meter.pids()
        taken = record.meter.used() - before
    return {"said": said, "ours": holder.pid, "listed": listed, "taken_bytes": taken}


def _inventory(record: Record) -> dict[str, Any]:
    """Return what phalanx's own inventory says of the device."""
    inventory = find_gpus()
    try:
        gpus = inventory.gpus()
        found: dict[str, Any] = {"kind": type(inventory).__name__, "gpus": [str(g) for g in gpus]}
        for gpu in gpus:
            found[gpu.uuid] = {
                "used": inventory.used_bytes(gpu.uuid),
                "processes": inventory.processes(gpu.uuid),
                "faults": [str(fault) for fault in inventory.faults(gpu.uuid)],
            }
    finally:
        inventory.close()
    with DevicePool.of("cpu" if record.rehearsal else "cuda", 1) as pool:
        lease = pool.acquire([Request(0, "e0/0")])[0]
        found["lease"] = dict(lease.environment)
        pool.give_back(lease)
    return found


def _xid(record: Record) -> dict[str, Any]:
    """Break a context; return the Xid events that NVML tells within five seconds."""
    if record.rehearsal:
        return {"events": [], "why": "a rehearsal"}
    meter: Any = record.meter
    nvml = meter.nvml
    events: list[dict[str, Any]] = []
    try:
        waiting = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(meter.handle, nvml.nvmlEventTypeXidCriticalError, waiting)
    except nvml.NVMLError as error:
        return {"events": [], "why": str(error)}
    device = record.device

    def task(tell: Callable[[str], None]) -> Any:  # noqa: ARG001  # its error is reported
        trigger("illegal address", device)

    with Holder(task) as holder:
        said = holder.line()
    until = time.monotonic() + 5.0
    why = ""
    while time.monotonic() < until:
        try:
            event = nvml.nvmlEventSetWait_v2(waiting, 500)
        except nvml.NVMLError as error:
            why = str(error)
            continue
        events.append({"xid": int(event.eventData), "type": int(event.eventType)})
    nvml.nvmlEventSetFree(waiting)
    return {"events": events, "why": why, "said": said, "kernel_log": _kernel_log()}


def _tests(record: Record) -> dict[str, Any]:
    """Run what ``make test-gpu`` runs, with this interpreter."""
    words = ["-m", "pytest", "-m", "gpu", "tests/gpu", "-v", "--durations=0"]
    words += ["-p", "no:cacheprovider"]
    # This process may see no GPU, as a driver should be; the tests' pool takes the user's mask.
    environment = dict(os.environ)
    if not environment.get("CUDA_VISIBLE_DEVICES"):
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, record.left() - 5.0),
            cwd=Path(__file__).parents[2],
            env=environment,
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code, text = -1, (late.stdout or b"").decode(errors="replace")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", text[-400:])}
    return {"code": code, "counts": counts, "output": text[-12000:]}
