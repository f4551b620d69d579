"""Faults that workers inject, into themselves or into the driver, and the commands for them.

Guarantees: a command is executed once, by one process (`claim`). A fault that ends by itself leaves
the worker as it was (limits restored, memory freed); a fault that lasts ends after its seconds,
whether or not a limit ends it before.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .catalog import FAULTS, SIGNALS, WORKER_POINTS
from .processes import TargetProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .schedule import ScheduledFault

ANY_RANK = -1
"""In a command: whichever rank runs the call."""

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


@dataclass(frozen=True, slots=True)
class FaultCommand:
    """A fault for *rank* to inject.

    Attributes:
        driver: The victim, if that is the driver.
    """

    fault: ScheduledFault
    rank: int
    driver: TargetProcess | None = None

    @property
    def key(self) -> str:
        """Its name for `claim`: one victim has one command, whichever call carries it."""
        number = self.fault.number
        return f"{number}-{self.rank}" if self.fault.target == "group" else f"{number}"

    @property
    def is_after_reply(self) -> bool:
        """Whether it is executed after the reply rather than in the call."""
        return self.fault.point == "after_reply"


def is_by_worker(fault: ScheduledFault) -> bool:
    """Whether a worker injects *fault*."""
    return FAULTS[fault.fault].how == "call" or fault.point in WORKER_POINTS


def receivers(
    fault: ScheduledFault, ranks: tuple[int, ...], shape: str, rank: int | None
) -> tuple[int, ...]:
    """Return the ranks to which a call of *shape* takes a command for *ranks*."""
    if fault.target == "driver":  # any rank passes the injection point
        return ranks if shape in ("collective", "gather") else (ANY_RANK,)
    if shape == "pool":
        return (ANY_RANK,) if fault.target == "random" else ()
    if shape == "single":
        return (rank,) if rank is not None and ranks == (rank,) else ()
    return ranks


def is_claimed(folder: Path, command: FaultCommand) -> bool:
    """Whether *command* was executed or withdrawn."""
    return _claim_path(folder, command.key).exists()


def claim(folder: Path, key: str) -> bool:
    """Claim the command *key*; return False if that was done before."""
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        os.close(os.open(_claim_path(folder, key), flags, 0o600))
    except FileExistsError:
        return False
    return True


def _claim_path(folder: Path, key: str) -> Path:
    return folder / f"command-{key}.done"


# --- injection ----------------------------------------------------------------------------


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
