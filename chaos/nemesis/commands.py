"""Commands: faults that a worker injects, into itself or into the driver, while it runs a call.

Guarantees: which ranks of a call receive a command follows from the fault and the shape of the
call; a command is executed once, by one process (`claim`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .catalog import FAULTS, WORKER_POINTS

if TYPE_CHECKING:
    from pathlib import Path

    from .processes import TargetProcess
    from .schedule import ScheduledFault

ANY_RANK = -1
"""In a command: whichever rank runs the call."""


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
