"""Why a child ended, in one vocabulary for processes, actors and supervisors.

Guarantees: every exit is exactly one `ExitKind`; whether it counts as a failure is OTP's rule
(``normal`` and ``shutdown`` do not, everything else does) and is decided here and nowhere else.

Left to others: what evidence there is (the runtime reads wait statuses and counters).

Source: the exit reasons of Erlang's ``supervisor``; ``normal``, ``shutdown`` and
``{shutdown, Term}`` are its normal exits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExitKind(StrEnum):
    """The class of an exit."""

    NORMAL = "normal"
    SHUTDOWN = "shutdown"
    CRASH = "crash"
    KILLED = "killed"
    UNRESPONSIVE = "unresponsive"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ExitReason:
    """Why a child ended.

    Attributes:
        kind: The class of the exit.
        detail: What is known beyond the class, for people. Empty where nothing is.
        code: The exit code of a process that exited, else None.
        signal: The number of the signal that ended a process, else None.
    """

    kind: ExitKind
    detail: str = ""
    code: int | None = None
    signal: int | None = None

    @property
    def is_failure(self) -> bool:
        """Whether a transient child is restarted after it: OTP's abnormal exit."""
        return self.kind not in (ExitKind.NORMAL, ExitKind.SHUTDOWN)

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else str(self.kind)


NORMAL = ExitReason(ExitKind.NORMAL)
SHUTDOWN = ExitReason(ExitKind.SHUTDOWN)
KILLED = ExitReason(ExitKind.KILLED)
