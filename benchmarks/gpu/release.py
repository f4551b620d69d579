"""E1: how long the memory of a GPU stays in use after SIGKILL, by size and by what else holds it.

The first rounds have every case once, so that a run that is cut off has measured all. The case
``grandchild`` has a process that inherited the device's descriptors; ``ipc`` one that has opened
the memory by a CUDA IPC handle; there the figures are taken until that process has ended too.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .device import (
    GIB,
    MIB,
    Holder,
    allocate,
    fork_idle_child,
    measure_release,
    synchronize,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .record import Record

_LIMIT = 15.0  # seconds to wait for memory; past it the case has no figure
_BESIDE = 1.0  # the same while another process may hold it
_FEW = 4  # rounds of the cases that take long


def run(record: Record) -> None:
    """Measure the cases in turns, 20 rounds or as many as there is time for."""
    unit = record.choose(GIB, 4 * MIB)
    sizes = record.choose((1, 20, 80, 130), (20, 40))
    room = record.meter.describe().get("total_bytes", 1 << 60) // unit - 3
    plain = sorted({min(size, room) for size in sizes})
    middle = plain[1]
    cases: list[tuple[str, int]] = [("plain", size) for size in plain]
    long = [(how, middle) for how in ("pinned", "grandchild", "ipc")]
    for number in range(record.choose(20, 1)):
        for how, size in cases + (long if number < _FEW else []):
            if not record.has_time(25.0):
                break
            row = _RUN[how](record, size * unit)
            record.add("kills", round=number, how=how, size=size, **row)
    for field in ("gone", "first", "free"):
        record.summarize("kills", field, "how", "size")


def _plain(record: Record, size: int) -> dict[str, Any]:
    idle = record.wait_idle()
    device = record.device

    def task(tell: Callable[[str], None]) -> Any:
        held = allocate(device, size)
        tell("ready")
        return held

    with Holder(task) as holder:
        said = holder.line()
        if said != "ready":
            return {"free": None, "said": said}
        return measure_release(record.meter, holder, idle, _LIMIT)


def _pinned(record: Record, size: int) -> dict[str, Any]:
    """The holder has as much pinned memory of the host as of the device, up to 16 GiB."""
    idle = record.wait_idle()
    device, rehearsal = record.device, record.rehearsal

    def task(tell: Callable[[str], None]) -> Any:
        torch: Any = import_module("torch")
        host = torch.empty(min(size, 16 * GIB), dtype=torch.uint8, pin_memory=not rehearsal)
        host.fill_(1)
        held = allocate(device, size)
        tell("ready")
        return host, held

    with Holder(task) as holder:
        said = holder.line()
        if said != "ready":
            return {"free": None, "said": said}
        return measure_release(record.meter, holder, idle, _LIMIT)


def _grandchild(record: Record, size: int) -> dict[str, Any]:
    """A child of the holder has its descriptors: is the memory free before that child ends?"""
    idle = record.wait_idle()
    device = record.device

    def task(tell: Callable[[str], None]) -> Any:
        held = allocate(device, size)
        tell(f"ready {fork_idle_child()}")
        return held

    with Holder(task) as holder:
        said = holder.line().split()
        if said[:1] != ["ready"]:
            return {"free": None, "said": " ".join(said)}
        child = int(said[1])
        try:
            beside = measure_release(record.meter, holder, idle, _BESIDE)
            beside["dead_is_listed"] = holder.pid in record.meter.pids()
        finally:
            os.kill(child, signal.SIGKILL)
        after = record.meter.settle(idle, _LIMIT)
        return {**beside, "free_after_the_other": after}


def _ipc(record: Record, size: int) -> dict[str, Any]:
    """Another process has opened the memory: is it free before that one ends?"""
    idle = record.wait_idle()
    device, rehearsal = record.device, record.rehearsal

    def export(tell: Callable[[str], None]) -> Any:
        held = allocate(device, size)
        handle = (
            b"" if rehearsal else pickle.dumps(held.untyped_storage()._share_cuda_())
        )  # torch has no other
        tell("ready " + base64.b64encode(handle).decode())
        return held

    with Holder(export) as holder:
        said = holder.line().split()
        if said[:1] != ["ready"]:
            return {"free": None, "said": " ".join(said)}

        def adopt(tell: Callable[[str], None]) -> Any:
            torch: Any = import_module("torch")
            opened: Any = None
            if not rehearsal:
                torch.zeros(1, device=device)  # the context
                handle = pickle.loads(base64.b64decode(said[1]))
                opened = torch.UntypedStorage._new_shared_cuda(*handle)  # noqa: SLF001  # as above
            synchronize(device)
            tell("open")
            return opened

        with Holder(adopt) as other:
            opened = other.line()
            beside = measure_release(record.meter, holder, idle, _BESIDE)
            at = other.signal(signal.SIGKILL)
            other.gone(at)
            after = record.meter.settle(idle, _LIMIT)
        return {**beside, "opened": opened, "free_after_the_other": after}


_RUN: dict[str, Callable[[Record, int], dict[str, Any]]] = {
    "plain": _plain,
    "pinned": _pinned,
    "grandchild": _grandchild,
    "ipc": _ipc,
}
