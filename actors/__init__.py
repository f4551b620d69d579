"""What users touch."""

from __future__ import annotations

from phalanx.runtime import AsyncOutput, CrashReport

from .child import executor_child, worker_child
from .context import WorkerContext
from .executor import Executor, Status
from .executor_actor import ExecutorActor, RankInfo
from .futures import CallFuture
from .layout import Layout
from .notices import Emitted
from .outcomes import Outcome, OutcomeKind
from .spec import StopPolicy
from .streams import ReplyStream
from .worker import WorkerActor, idempotent, limits, step

__all__ = [
    "AsyncOutput",
    "CallFuture",
    "CrashReport",
    "Emitted",
    "Executor",
    "ExecutorActor",
    "Layout",
    "Outcome",
    "OutcomeKind",
    "RankInfo",
    "ReplyStream",
    "Status",
    "StopPolicy",
    "WorkerActor",
    "WorkerContext",
    "executor_child",
    "idempotent",
    "limits",
    "step",
    "worker_child",
]
