"""What to do: the pure half of phalanx, and the one actor that acts on it."""

from __future__ import annotations

from .errors import (
    BadArguments,
    CallerError,
    CallTimeout,
    ExecutorClosed,
    NotPicklable,
    PhalanxError,
    RemoteError,
    RuntimeFault,
    SpecError,
    StartFailed,
    UnknownMethod,
    WorkerDied,
    WorkerError,
    WouldDeadlock,
)
from .exits import KILLED, NORMAL, SHUTDOWN, ExitKind, ExitReason

__all__ = [
    "KILLED",
    "NORMAL",
    "SHUTDOWN",
    "BadArguments",
    "CallTimeout",
    "CallerError",
    "ExecutorClosed",
    "ExitKind",
    "ExitReason",
    "NotPicklable",
    "PhalanxError",
    "RemoteError",
    "RuntimeFault",
    "SpecError",
    "StartFailed",
    "UnknownMethod",
    "WorkerDied",
    "WorkerError",
    "WouldDeadlock",
]
