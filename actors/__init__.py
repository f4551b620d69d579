"""What users touch."""

from __future__ import annotations

from phalanx.actors.api.children import executor_child, tree_from_toml, worker_child
from phalanx.actors.api.executor import Executor
from phalanx.actors.api.supervised import SupervisedExecutor, Supervisor
from phalanx.actors.calls.call import Call
from phalanx.actors.calls.futures import CallFuture
from phalanx.actors.calls.streams import ReplyStream
from phalanx.actors.group.actor import GroupActor
from phalanx.actors.group.handle import Group
from phalanx.actors.group.standby import StandbyLost
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
from phalanx.actors.spec.options import (
    Devices,
    ExecutorSpec,
    Launch,
    Limits,
    RestartPolicy,
    StopPolicy,
)
from phalanx.actors.spec.proxy import RemoteMethod
from phalanx.actors.spec.results import Emitted, Outcome, OutcomeKind, Status
from phalanx.actors.spec.worker import WorkerActor, idempotent, limits, method, step
from phalanx.runtime import AsyncOutput, CrashReport, RankInfo

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
    "Devices",
    "Emitted",
    "Executor",
    "ExecutorSpec",
    "Group",
    "GroupActor",
    "Launch",
    "Layout",
    "Limits",
    "Outcome",
    "OutcomeKind",
    "RankInfo",
    "RemoteMethod",
    "ReplyStream",
    "RestartPolicy",
    "StandbyLost",
    "Status",
    "StopPolicy",
    "SupervisedExecutor",
    "Supervisor",
    "WorkerActor",
    "WorkerContext",
    "executor_child",
    "idempotent",
    "installed",
    "limits",
    "method",
    "step",
    "tree_from_toml",
    "worker_child",
]
