"""What users touch."""

from __future__ import annotations

from phalanx.actors.api.children import executor_child, worker_child
from phalanx.actors.api.executor import Executor
from phalanx.actors.calls.call import Call
from phalanx.actors.calls.futures import CallFuture
from phalanx.actors.calls.streams import ReplyStream
from phalanx.actors.group.actor import ExecutorActor
from phalanx.actors.group.handle import Shared
from phalanx.actors.group.messages import Emitted
from phalanx.actors.observe.hooks import POINTS, installed
from phalanx.actors.spec.checkpoint_policy import (
    Checkpoint,
    CheckpointFailed,
    CheckpointPolicy,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointTaken,
)
from phalanx.actors.spec.context import WorkerContext
from phalanx.actors.spec.layout import Layout
from phalanx.actors.spec.options import ExecutorSpec, StopPolicy
from phalanx.actors.spec.results import Outcome, OutcomeKind, RankInfo, Status
from phalanx.actors.spec.worker import WorkerActor, idempotent, limits, step
from phalanx.runtime import AsyncOutput, CrashReport

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
