"""E3: a process in an endless kernel, or stopped, or in native code that holds the interpreter.

What ends it, when the process is gone, and when its memory is free; then the same through
phalanx, from the call to the answer of the rank that replaces the hung one.
"""

from __future__ import annotations

import ctypes
import signal
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx import Executor, Limits, Runtime, Strategy, WorkerActor
from phalanx.errors import WorkerDied

from .device import GIB, MIB, Holder, allocate, measure_release, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

    from .record import Record

_ENDLESS = 1 << 62  # cycles of the device's clock: a century
_HANG = 2.0  # seconds that a call may take in the runs through phalanx
_WAIT = 1.0  # seconds that a signal gets to end the process


def run(record: Record) -> None:
    """Measure each way to hang with each signal, and then through phalanx."""
    size = record.choose(8 * GIB, 100 * MIB)
    with Runtime(console=None, stream=False) as runtime:
        for number in range(record.choose(5, 1)):
            for how in record.choose(("kernel", "interpreter", "idle"), ("kernel",)):
                for name in ("SIGTERM", "SIGKILL", "SIGSTOP"):
                    if record.has_time(40.0):
                        row = _signal(record, how, getattr(signal, name), size)
                        record.add("signals", round=number, how=how, signal=name, **row)
            for how in ("kernel", "interpreter"):
                if record.has_time(40.0):
                    row = _phalanx(record, runtime, how)
                    record.add("phalanx", round=number, how=how, **row)
    for field in ("gone", "free", "gone_by_signal"):
        record.summarize("signals", field, "how", "signal")
    record.summarize("phalanx", "known", "how")
    record.summarize("phalanx", "answered", "how")


def hang(how: str, device: str) -> None:
    """Do not return: ``kernel``, ``interpreter``, or ``idle`` (which does return)."""
    if how == "interpreter":
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter's lock
    elif how == "kernel" and device != "cpu":
        import_module("torch").cuda._sleep(_ENDLESS)  # noqa: SLF001  # there is no other
    elif how == "kernel":
        time.sleep(600)


def _signal(record: Record, how: str, number: int, size: int) -> dict[str, Any]:
    """Send a signal to a process that hangs; SIGKILL if it lives on."""
    device, idle = record.device, record.wait_idle()

    def task(tell: Callable[[str], None]) -> Any:
        held = allocate(device, size)
        tell("ready")
        hang(how, device)
        return held

    with Holder(task) as holder:
        said = holder.line()
        time.sleep(0.05)  # until it hangs: nothing tells when a kernel has begun
        if number == signal.SIGKILL:
            row = measure_release(record.meter, holder, idle, 20.0)
            return {**row, "said": said, "gone_by_signal": row["gone"]}
        at = holder.signal(number)
        alone = holder.gone(at, record.choose(_WAIT, 0.3))
        held = record.meter.used() - idle
        rest = measure_release(record.meter, holder, idle, 20.0)
        return {**rest, "said": said, "gone_by_signal": alone, "held_bytes_then": held}


class Hanging(WorkerActor):
    """A rank that hangs in a call."""

    def compute(self) -> float:
        """Return 8.0, from the device."""
        torch: Any = import_module("torch")
        value = float(torch.ones(8, device=self.ctx.device).sum())
        synchronize(self.ctx.device)
        return value

    def hang(self, how: str) -> None:
        """Hang, and wait for it."""
        hang(how, self.ctx.device)
        synchronize(self.ctx.device)


def _phalanx(record: Record, runtime: Runtime, how: str) -> dict[str, Any]:
    devices = record.choose("cuda", "cpu")
    with Executor(
        Hanging,
        1,
        devices=devices,
        strategy=Strategy.ONE_FOR_ONE,
        limits=Limits(hang=record.choose(_HANG, 0.5)),
        runtime=runtime,
    ) as ex:
        assert ex.call("compute", 60.0, rank=0) == 8.0
        began = time.monotonic()
        try:
            ex.call("hang", 60.0, args=(how,), rank=0)
            said = "it returned"
        except WorkerDied as died:
            said = str(died.report.reason)
        known = time.monotonic() - began
        right = ex.call("compute", 60.0, rank=0) == 8.0
        answered = time.monotonic() - began
    return {"said": said, "known": known, "answered": answered, "right": right}
