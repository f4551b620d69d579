"""Faults that workers inject, into themselves or into the driver, and the orders for them.

Guarantees: an order is carried out once, by one process. A fault that ends by itself leaves
the worker as it was (limits restored, memory freed); a fault that lasts ends after its seconds,
whether or not a limit ends it before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from phalanx.chaos.history.journal import recording

from .catalog import FAULTS, SIGNALS, WORKER_POINTS
from .processes import TargetProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .schedule import ScheduledFault

ANY_RANK = "any"
"""In an order: whichever rank comes to it first."""

Moment = Literal["start", "begin", "end", "reply"]
"""When a worker injects: at its start, in a call before or after its method, after the reply."""

_ROOM_BYTES = 64 << 20  # what is left to allocate under the limit that is set
_CHUNK_BYTES = 8 << 20
EXIT_CODE = 57
"""The exit code of the fault ``exit``; arbitrary."""

_INSTEAD = ("raise", "memory", "cuda_error", "cuda_oom")  # raise in place of a result


class InjectedError(Exception):
    """The exception of the faults ``raise``, ``raise_before`` and ``start_raise``."""


Order = tuple["ScheduledFault", "TargetProcess | None"]
"""A fault, and the driver if that is its victim."""


class Orders:
    """Faults for workers to inject: one file for each rank that is to, in the folder of the run.

    The process that removes the file has the order: the first worker that reaches it, also the
    successor of one that died before, or the nemesis, which withdraws it.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / "orders"
        self._folder.mkdir(exist_ok=True)

    def give(
        self, fault: ScheduledFault, group: str, rank: int | str, driver: TargetProcess | None
    ) -> Path:
        """Order *rank* of *group*, or ``any``, to inject *fault*: into *driver*, or into itself."""
        name = f"{_place(group, rank)}.{_moment_of(fault)}.{fault.number:06}"
        part = self._folder / f".{name}"
        with recording(self._folder):
            part.write_bytes(pickle.dumps((fault, driver)))
            return part.rename(self._folder / name)

    def take(self, group: str, rank: int, moment: Moment) -> Order | None:
        """Return the oldest order for this rank and *moment*, if there is one."""
        places = tuple(f"{_place(group, each)}.{moment}." for each in (rank, ANY_RANK))
        names = os.listdir(self._folder)  # noqa: PTH208  # names only, and in each call
        for name in sorted(name for name in names if name.startswith(places)):
            with contextlib.suppress(FileNotFoundError):
                given = (self._folder / name).read_bytes()
                (self._folder / name).unlink()
                order: Order = pickle.loads(given)
                return order
        return None


def withdraw(order: Path) -> bool:
    """Withdraw *order*; return False if a worker has taken it."""
    try:
        order.unlink()
    except FileNotFoundError:
        return False
    return True


def is_by_worker(fault: ScheduledFault) -> bool:
    """Whether a worker injects *fault*."""
    return FAULTS[fault.fault].how in ("call", "start") or fault.point in WORKER_POINTS


def _moment_of(fault: ScheduledFault) -> Moment:
    if FAULTS[fault.fault].how == "start":
        return "start"
    if fault.point == "after_reply":
        return "reply"
    return "end" if fault.fault in _INSTEAD else "begin"


def _place(group: str, rank: int | str) -> str:
    return f"{group}-{rank}".replace("/", "_")


# --- injection ----------------------------------------------------------------------------


def inject_here(fault: str, seconds: float) -> int | None:
    """Inject *fault* into this process; return the pid of a process that it leaves behind."""
    if fault not in SIGNALS:
        left = _INJECTIONS[fault](seconds)
        return left if isinstance(left, int) else None
    TargetProcess.of(os.getpid()).inject(fault, seconds)
    if fault == "term" and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        time.sleep(10.0)  # a worker handles it a moment later
    return None


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
    raise InjectedError("injected by a chaos run")


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


def _exhaust_device(_seconds: float) -> None:
    import torch  # noqa: PLC0415  # only on machines with a GPU

    torch.empty(1 << 44, dtype=torch.uint8, device="cuda")


_INJECTIONS: Mapping[str, Callable[[float], object]] = {
    "segv": lambda _seconds: ctypes.string_at(0),
    "exit": lambda _seconds: os._exit(EXIT_CODE),
    "hang": _hang,
    "slow": time.sleep,
    "grandchild": _grandchild,
    "start_raise": _raise,
    "raise": _raise,
    "raise_before": _raise,
    "memory": _exhaust_memory,
    "cuda_error": _break_device,
    "cuda_oom": _exhaust_device,
}
