"""Faults that a process injects into itself.

Guarantees: a fault that ends by itself leaves the worker as it was (limits restored, memory freed);
a fault that lasts ends after its seconds, whether or not a limit ends it before.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .catalog import SIGNALS
from .processes import TargetProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ROOM_BYTES = 64 << 20  # what is left to allocate under the limit that is set
_CHUNK_BYTES = 8 << 20
EXIT_CODE = 57
"""The exit code of the fault ``exit``; arbitrary."""

INSTEAD = frozenset(("raise", "memory", "cuda_error"))
"""Faults that raise in place of a result, after the method has run."""

BEFORE = frozenset(("raise_before",))
"""Faults that raise in place of the method: the others may wait for this rank in theirs."""


class InjectedError(Exception):
    """The exception of the faults ``raise``, ``raise_before`` and ``start_raise``."""


def inject_here(fault: str, seconds: float) -> int | None:
    """Inject *fault* into this process; return the pid of a process that it leaves behind."""
    if fault in SIGNALS:
        _signal(fault, seconds)
        return None
    return _INJECTIONS[fault](seconds)


def _signal(fault: str, seconds: float) -> None:
    TargetProcess.of(os.getpid()).inject(fault, seconds)
    if fault == "term" and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        time.sleep(10.0)  # a worker handles it a moment later


def _segv(_seconds: float) -> None:
    ctypes.string_at(0)


def _exit(_seconds: float) -> NoReturn:
    os._exit(EXIT_CODE)


def _hang(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _grandchild(_seconds: float) -> int:
    code = "import time; time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    child.returncode = 0  # so that Popen warns of nothing
    return child.pid


def _raise(_seconds: float) -> NoReturn:
    msg = "injected by a chaos run"
    raise InjectedError(msg)


def _exhaust_memory(_seconds: float) -> NoReturn:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    hoard: list[bytearray] = []
    try:
        while True:
            hoard.append(bytearray(_CHUNK_BYTES))
    finally:
        hoard.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _break_device(_seconds: float) -> None:
    import torch  # noqa: PLC0415  # only on machines with a GPU

    where = torch.tensor([1 << 20], device="cuda")
    torch.zeros(1, device="cuda").index_select(0, where)
    torch.cuda.synchronize()


_INJECTIONS: Mapping[str, Callable[[float], int | None]] = {
    "segv": _segv,
    "exit": _exit,
    "hang": _hang,
    "slow": time.sleep,
    "grandchild": _grandchild,
    "start_raise": _raise,
    "raise": _raise,
    "raise_before": _raise,
    "memory": _exhaust_memory,
    "cuda_error": _break_device,
}
