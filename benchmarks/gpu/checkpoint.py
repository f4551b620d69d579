"""E8: a process whose GPU memory is moved to the host, by the driver's ``cuCheckpointProcess*``.

What a parked spare would cost: seconds for each step, bytes left on the GPU and held on the host,
and whether its memory is what it was. The calls are made in a process of their own.
"""

from __future__ import annotations

import json
import signal
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.runtime import procfs

from .device import GIB, MIB, Holder, find_meter, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

    from .record import Record

_CALLS = ("Lock", "Checkpoint", "Restore", "Unlock")


def run(record: Record) -> None:
    """Park and wake a process of each size."""
    unit = record.choose(GIB, 4 * MIB)
    for number in range(record.choose(3, 1)):
        for size in (1, 10, 40):
            if record.has_time(45.0):
                record.add("parked", round=number, size=size, **_park(record, size * unit))
    for call in _CALLS:
        record.summarize("parked", call.lower(), "size")


def _park(record: Record, size: int) -> dict[str, Any]:
    device, rehearsal = record.device, record.rehearsal

    def hold(tell: Callable[[str], None]) -> Any:
        torch: Any = import_module("torch")
        held = torch.arange(size // 8, dtype=torch.int64, device=device)
        synchronize(device)

        def check(*_: object) -> None:
            tell(str(bool((held[:: 1 << 12].diff() == 1 << 12).all())))

        signal.signal(signal.SIGUSR1, check)
        tell("ready")
        return held

    with Holder(hold) as holder:
        found: dict[str, Any] = {"said": holder.line()}
        before = _resident(holder.pid)

        def operate(tell: Callable[[str], None]) -> Any:
            tell(json.dumps(_operate(holder.pid, rehearsal=rehearsal)))
            return NotImplemented  # it ends

        with Holder(operate) as operator:
            said = operator.line(120.0)
        found |= json.loads(said) if said.startswith("{") else {"failed": said}
        found["host_bytes_before"] = before
        holder.signal(signal.SIGUSR1)
        found["intact"] = holder.line(30.0)
    return found


def _operate(pid: int, *, rehearsal: bool) -> dict[str, Any]:
    """Make the calls; return the seconds of each, and the memory after it."""
    driver: Any = _StandIn() if rehearsal else import_module("cuda.bindings.driver")
    driver.cuInit(0)
    meter = find_meter(rehearsal=rehearsal)  # NVML of this process: that of the parent is not ours
    found: dict[str, Any] = {"bytes_before": meter.used()}
    for name in _CALLS:
        began = time.monotonic()
        (code, *_) = getattr(driver, f"cuCheckpointProcess{name}")(pid, None)
        found[name.lower()] = time.monotonic() - began
        found[f"bytes_after_{name.lower()}"] = meter.used()
        found[f"host_bytes_after_{name.lower()}"] = _resident(pid)
        if int(code):
            return {**found, "failed": f"{name}: {code}"}
    return found


def _resident(pid: int) -> int:
    fields = (procfs.content(f"/proc/{pid}/statm") or b"0 0").split()
    return int(fields[1]) * 4096


class _StandIn:
    """The calls of the driver, of which none does anything."""

    def __getattr__(self, name: str) -> Callable[..., tuple[int]]:
        if name != "cuInit" and name.removeprefix("cuCheckpointProcess") not in _CALLS:
            raise AttributeError(name)
        return lambda *_: (0,)
