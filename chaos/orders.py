"""The faults that a process does to itself: each as real as the kernel and the interpreter make it.

Guarantees: what ends by itself leaves the worker as it was (limits restored, memory freed); what
lasts, lasts for the seconds it was given, so that a run ends where nothing limits a hang.

Left to others: when and to whom (`striker`); writing down that it was done, which comes first
(`witness`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from phalanx.runtime import read_task

from .faults import SIGNALS
from .parts import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ROOM_BYTES = 64 << 20  # what is left to allocate under the limit that is set
_CHUNK_BYTES = 8 << 20
_MOST_DESCRIPTORS = 1 << 16
EXIT_CODE = 57
"""The exit code of the fault ``exit``; arbitrary."""


class InjectedError(Exception):
    """What the faults ``raise`` and ``raise_before`` raise in place of a call's answer."""


class UnpicklableError(InjectedError):
    """What the fault ``unpicklable`` raises: it holds what cannot travel."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def carry_out(fault: str, seconds: float) -> int | None:
    """Do *fault* to this process; return the pid of a process that it leaves behind."""
    return _DEEDS[fault](seconds)


def carry_out_on(whom: tuple[int, int], fault: str, seconds: float) -> None:
    """Do *fault*, a signal, to another process; one that is stopped continues after *seconds*.

    Args:
        whom: Its pid, and when it was started, in ticks.
    """
    part = Part(*whom, role="other", label="")
    if fault == "stop":
        part.stop(seconds)
    else:
        part.send(SIGNALS[fault])


def _send(number: int) -> Callable[[float], None]:
    def send(_seconds: float) -> None:
        os.kill(os.getpid(), number)
        if number == signal.SIGTERM and signal.getsignal(number) != signal.SIG_IGN:
            time.sleep(10.0)  # a worker takes it a moment later

    return send


def _stop(seconds: float) -> None:
    task = read_task(os.getpid())
    assert task is not None
    Part(*task.key, role="other", label="").stop(seconds)


def _segv(_seconds: float) -> None:
    ctypes.string_at(0)  # read where nothing is


def _exit(_seconds: float) -> NoReturn:
    os._exit(EXIT_CODE)


def _hang(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def _hold_gil(seconds: float) -> None:
    """Be in native code that does not let go of the interpreter."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


def _grandchild(_seconds: float) -> int:
    """Start a process in a session of its own, and forget it."""
    code = "import time; time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    child.returncode = 0
    return child.pid


def _close_descriptors(_seconds: float) -> None:
    """Close every descriptor but the standard ones, as a careless library does."""
    os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), _MOST_DESCRIPTORS))


def _raise(_seconds: float) -> NoReturn:
    msg = "this is the fault 'raise' of a chaos run"
    raise InjectedError(msg)


def _raise_unpicklable(_seconds: float) -> NoReturn:
    msg = "this is the fault 'unpicklable' of a chaos run"
    raise UnpicklableError(msg)


def _exhaust_memory(_seconds: float) -> NoReturn:
    """Allocate under a limit until there is no more."""
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


def _exhaust_device(_seconds: float) -> NoReturn:
    """Allocate on the device until there is no more."""
    import torch  # noqa: PLC0415  # only where there is a GPU

    hoard: list[torch.Tensor] = []
    try:
        while True:
            hoard.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    finally:
        hoard.clear()
        torch.cuda.empty_cache()


def _break_device(_seconds: float) -> None:
    """Have a kernel fail, after which nothing on the device works in this process."""
    import torch  # noqa: PLC0415  # as above

    where = torch.tensor([1 << 20], device="cuda")
    torch.zeros(1, device="cuda").index_select(0, where)
    torch.cuda.synchronize()


INSTEAD = frozenset(("raise", "unpicklable", "memory", "cuda_oom", "cuda_error"))
"""What takes the place of an answer: it raises, after the call has run."""

BEFORE = frozenset(("raise_before",))
"""What takes the place of the call itself: it raises.

In a process group the others may be in an operation by then that this rank never begins.
"""

_DEEDS: Mapping[str, Callable[[float], int | None]] = {
    "kill": _send(signal.SIGKILL),
    "term": _send(signal.SIGTERM),
    "stop": _stop,
    "segv": _segv,
    "exit": _exit,
    "hang": _hang,
    "gil": _hold_gil,
    "slow": time.sleep,
    "grandchild": _grandchild,
    "descriptors": _close_descriptors,
    "start_raise": _raise,
    "start_hang": time.sleep,
    "raise": _raise,
    "raise_before": _raise,
    "unpicklable": _raise_unpicklable,
    "memory": _exhaust_memory,
    "cuda_oom": _exhaust_device,
    "cuda_error": _break_device,
}
