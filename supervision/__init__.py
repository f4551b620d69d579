"""The supervision layer: what to do, as pure decisions, and the actors that do it."""

from __future__ import annotations

from .core.decider import (
    GPU_WORKER,
    RESUME_UNLESS_BROKEN,
    Decider,
    Directive,
    Rule,
    is_broken_process_group,
    is_sticky_device_error,
)
from .core.messages import ChildRow, Counts, Refusal, Shown
from .core.notices import (
    CallbackFailed,
    ChildExited,
    ChildLost,
    ChildStarted,
    ChildStartFailed,
    HandleFailed,
    Notice,
    SupervisorBegan,
    SupervisorExited,
    SupervisorGaveUp,
    SupervisorReady,
    SupervisorStartFailed,
    notice_fields,
)
from .core.policy import (
    KILLED,
    NORMAL,
    SHUTDOWN,
    AutoShutdown,
    BackOff,
    ChildType,
    ExitKind,
    ExitReason,
    Intensity,
    Restart,
    RestartWindow,
    Strategy,
)
from .core.snapshot import ChildSnapshot, SupervisorSnapshot
from .core.spec import (
    BRUTAL_KILL,
    IGNORE,
    ChildHandle,
    ChildSpec,
    Shutdown,
    StartFunction,
    SupervisorSpec,
)
from .errors import (
    BadArguments,
    CallerError,
    CallTimeout,
    ChildRefused,
    ExecutorClosed,
    LockNotHeld,
    LockTimeout,
    MessageTooLarge,
    NoDevice,
    NotPicklable,
    PhalanxError,
    RemoteError,
    RuntimeFault,
    SpecError,
    StartFailed,
    StreamNotTaken,
    SupervisorDown,
    Unhealthy,
    UnknownMethod,
    WorkerDied,
    WorkerError,
    WouldDeadlock,
)
from .ranks.decide import decide_ranks
from .ranks.group import (
    Begin,
    CloseAsked,
    Decided,
    End,
    GroupState,
    Hold,
    Phase,
    RankAction,
    RankEvent,
    RankExited,
    RankReady,
    RankReformed,
    RankState,
    ReformRanks,
    ResizeAsked,
    RestartAsked,
    Serve,
    StartRanks,
    StopRanks,
    WaitOver,
    WaitUntil,
    new_group,
)
from .tree.adapters import pykka_child, thread_child
from .tree.mailbox import ProtectedActor, start_actor
from .tree.monitors import Down, Lifeline, link
from .tree.services import ThreadTimers, Timers
from .tree.start import StartContext
from .tree.supervisor import Supervisor, SupervisorView
from .tree.toml import tree_from_toml
from .validate import (
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_limit,
    check_number,
    check_seconds,
    check_word,
)

__all__ = [
    "BRUTAL_KILL", "GPU_WORKER", "IGNORE", "KILLED", "NORMAL", "RESUME_UNLESS_BROKEN", "SHUTDOWN",
    "AutoShutdown", "BackOff", "BadArguments", "Begin", "CallTimeout", "CallbackFailed",
    "CallerError", "ChildExited", "ChildHandle", "ChildLost", "ChildRefused", "ChildRow",
    "ChildSnapshot", "ChildSpec", "ChildStartFailed", "ChildStarted", "ChildType", "CloseAsked",
    "Counts", "Decided", "Decider", "Directive", "Down", "End", "ExecutorClosed", "ExitKind",
    "ExitReason", "GroupState", "HandleFailed", "Hold", "Intensity", "Lifeline", "LockNotHeld",
    "LockTimeout", "MessageTooLarge", "NoDevice", "NotPicklable", "Notice", "PhalanxError",
    "Phase", "ProtectedActor", "RankAction", "RankEvent", "RankExited", "RankReady",
    "RankReformed", "RankState", "ReformRanks", "Refusal", "RemoteError", "ResizeAsked",
    "Restart", "RestartAsked", "RestartWindow", "Rule", "RuntimeFault", "Serve", "Shown",
    "Shutdown", "SpecError", "StartContext", "StartFailed", "StartFunction", "StartRanks",
    "StopRanks", "Strategy", "StreamNotTaken", "Supervisor", "SupervisorBegan", "SupervisorDown",
    "SupervisorExited", "SupervisorGaveUp", "SupervisorReady", "SupervisorSnapshot",
    "SupervisorSpec", "SupervisorStartFailed", "SupervisorView", "ThreadTimers", "Timers",
    "Unhealthy", "UnknownMethod", "WaitOver", "WaitUntil", "WorkerDied", "WorkerError",
    "WouldDeadlock", "check_callable", "check_choice", "check_count", "check_flag", "check_kind",
    "check_limit", "check_number", "check_seconds", "check_word", "decide_ranks",
    "is_broken_process_group", "is_sticky_device_error", "link", "new_group", "notice_fields",
    "pykka_child", "start_actor", "thread_child", "tree_from_toml",
]  # fmt: skip
