"""What to do: the pure half of phalanx, and the one actor that acts on it."""

from __future__ import annotations

from .answers import (
    ChildRow,
    Counts,
    Refusal,
    Shown,
)
from .backoff import (
    BackOff,
)
from .child import (
    IGNORE,
    ChildHandle,
    Ignore,
    StartContext,
    StartFunction,
)
from .decider import (
    GPU_WORKER,
    Cause,
    Decider,
    Directive,
    Rule,
    is_sticky_device_error,
)
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
from .exits import (
    KILLED,
    NORMAL,
    SHUTDOWN,
    ExitKind,
    ExitReason,
)
from .notices import (
    Notice,
    notice_fields,
)
from .spec import (
    BRUTAL_KILL,
    BrutalKill,
    ChildSpec,
    Shutdown,
    SupervisorSpec,
)
from .strategy import (
    AutoShutdown,
    ChildType,
    Restart,
    Strategy,
)
from .window import (
    Intensity,
    RestartWindow,
)

__all__ = [
    "BRUTAL_KILL",
    "GPU_WORKER",
    "IGNORE",
    "KILLED",
    "NORMAL",
    "SHUTDOWN",
    "AutoShutdown",
    "BackOff",
    "BadArguments",
    "BrutalKill",
    "CallTimeout",
    "CallerError",
    "Cause",
    "ChildHandle",
    "ChildRow",
    "ChildSpec",
    "ChildType",
    "Counts",
    "Decider",
    "Directive",
    "ExecutorClosed",
    "ExitKind",
    "ExitReason",
    "Ignore",
    "Intensity",
    "NotPicklable",
    "Notice",
    "PhalanxError",
    "Refusal",
    "RemoteError",
    "Restart",
    "RestartWindow",
    "Rule",
    "RuntimeFault",
    "Shown",
    "Shutdown",
    "SpecError",
    "StartContext",
    "StartFailed",
    "StartFunction",
    "Strategy",
    "SupervisorSpec",
    "UnknownMethod",
    "WorkerDied",
    "WorkerError",
    "WouldDeadlock",
    "is_sticky_device_error",
    "notice_fields",
]
