"""E12: a chaos run on a GPU: kills, stops, CUDA errors, running out of memory.

Two ranks share the GPU. The verdict is that of the chaos checker; what is left on the GPU after it
is in the record of every experiment (``idle_bytes``, ``bytes_at_end``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx import Executor, Limits, Strategy, WorkerActor
from phalanx.actors import Devices
from phalanx.chaos import Chaos, run_chaos

from .device import GIB, MIB, allocate

if TYPE_CHECKING:
    import random

    from .record import Record

_FAULTS = ("kill", "term", "stop", "hang", "raise")


class Adding(WorkerActor):
    """A rank that holds memory of its device, and adds on it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def on_start(self, ctx: Any) -> None:
        """Take the memory."""
        self.held = allocate(ctx.device, self._size)

    def add(self, value: float) -> float:
        """Return twice *value*, from the device."""
        torch: Any = import_module("torch")
        one = torch.full((1 << 16,), value, dtype=torch.float64, device=self.ctx.device)
        return float((one + one)[-1])


def on_gpu() -> tuple[Executor[Any], Any]:
    """Two ranks that share the GPU, with 4 GiB each."""
    return _target(Devices(names="cuda", per_rank=0.5), 4 * GIB)


def on_cpu() -> tuple[Executor[Any], Any]:
    """The same without one."""
    return _target("cpu", 16 * MIB)


def _target(devices: Any, size: int) -> tuple[Executor[Any], Any]:
    built: Executor[Any] = Executor(
        Adding,
        2,
        args=(size,),
        devices=devices,
        strategy=Strategy.ONE_FOR_ONE,
        limits=Limits(start=60.0, hang=4.0, stopped=2.0),
    )
    return built, _traffic


def _traffic(executor: Executor[Any], chance: random.Random) -> None:
    value = chance.random()
    answer = executor.call("add", 30.0, args=(value,), rank=chance.randrange(2), retries=9)
    if answer != value * 2:
        msg = f"{value} + {value} gave {answer}"
        raise AssertionError(msg)


def run(record: Record) -> None:
    """Run it for all but the last 100 seconds, at most half of the time, which its end may take."""
    faults = _FAULTS if record.rehearsal else (*_FAULTS, "cuda_error", "cuda_oom")
    duration = max(2.0, record.choose(max(record.left() - 100.0, record.left() / 2), 4.0))
    plan = Chaos(duration=duration, rate=1.0, faults=faults, seed=12, call_timeout=10.0)
    result = run_chaos(on_cpu if record.rehearsal else on_gpu, plan)
    record.set(
        verdict=result.verdict,
        inconclusive=result.inconclusive,
        violations=[str(each) for each in result.violations[:20]],
        seconds_of_faults=duration,
        faults=[
            {"fault": each.fault, "done": each.done, "missed": each.missed, **each.recovery}
            for each in result.faults
        ],
    )
