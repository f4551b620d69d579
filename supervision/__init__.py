"""What to do: the pure half of phalanx, and the one actor that acts on it."""

from __future__ import annotations

from .backoff import BackOff
from .decider import GPU_WORKER, Cause, Decider, Directive, Rule, is_sticky_device_error
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
from .strategy import AutoShutdown, ChildType, Restart, Strategy
from .window import Intensity, RestartWindow

__all__ = [
    "GPU_WORKER",
    "KILLED",
    "NORMAL",
    "SHUTDOWN",
    "AutoShutdown",
    "BackOff",
    "BadArguments",
    "CallTimeout",
    "CallerError",
    "Cause",
    "ChildType",
    "Decider",
    "Directive",
    "ExecutorClosed",
    "ExitKind",
    "ExitReason",
    "Intensity",
    "NotPicklable",
    "PhalanxError",
    "RemoteError",
    "Restart",
    "RestartWindow",
    "Rule",
    "RuntimeFault",
    "SpecError",
    "StartFailed",
    "Strategy",
    "UnknownMethod",
    "WorkerDied",
    "WorkerError",
    "WouldDeadlock",
    "is_sticky_device_error",
]
