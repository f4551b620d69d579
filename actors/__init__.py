"""What users touch."""

from __future__ import annotations

from phalanx.runtime import AsyncOutput, CrashReport

from .calls import Call
from .checkpoint import (
    Checkpoint,
    CheckpointFailed,
    CheckpointPolicy,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointTaken,
)
from .child import executor_child, worker_child
from .context import WorkerContext
from .executor import Executor
from .executor_actor import ExecutorActor
from .futures import CallFuture
from .layout import Layout
from .notices import Emitted
from .outcomes import Outcome, OutcomeKind
from .probe import POINTS, installed
from .shared import Shared
from .spec import ExecutorSpec, StopPolicy
from .status import RankInfo, Status
from .streams import ReplyStream
from .worker import WorkerActor, idempotent, limits, step

__all__ = [
    "POINTS",
    "AsyncOutput",
    "Call",
    "CallFuture",
    "Checkpoint",
    "CheckpointFailed",
    "CheckpointPolicy",
    "CheckpointRejected",
    "CheckpointRestored",
    "CheckpointTaken",
    "CrashReport",
    "Emitted",
    "Executor",
    "ExecutorActor",
    "ExecutorSpec",
    "Layout",
    "Outcome",
    "OutcomeKind",
    "RankInfo",
    "ReplyStream",
    "Shared",
    "Status",
    "StopPolicy",
    "WorkerActor",
    "WorkerContext",
    "executor_child",
    "idempotent",
    "installed",
    "limits",
    "step",
    "worker_child",
]
