"""The interface for users: executors, calls, workers, options and results."""

from __future__ import annotations

from phalanx.runtime import AsyncOutput as AsyncOutput
from phalanx.runtime import CrashReport as CrashReport
from phalanx.runtime import RankInfo as RankInfo

from .api.aio import AsyncExecutor as AsyncExecutor
from .api.children import executor_child as executor_child
from .api.children import tree_from_toml as tree_from_toml
from .api.children import worker_child as worker_child
from .api.executor import Executor as Executor
from .api.lasting_executor import SupervisedExecutor as SupervisedExecutor
from .api.lasting_executor import Supervisor as Supervisor
from .calls.call import Call as Call
from .calls.futures import CallFuture as CallFuture
from .calls.streams import ReplyStream as ReplyStream
from .group.handle import Group as Group
from .group.standby import StandbyLost as StandbyLost
from .observe.hooks import POINTS as POINTS
from .observe.hooks import installed as installed
from .spec.checkpoint_policy import Checkpoint as Checkpoint
from .spec.checkpoint_policy import CheckpointFailed as CheckpointFailed
from .spec.checkpoint_policy import CheckpointPolicy as CheckpointPolicy
from .spec.checkpoint_policy import CheckpointRejected as CheckpointRejected
from .spec.checkpoint_policy import CheckpointRestored as CheckpointRestored
from .spec.checkpoint_policy import CheckpointTaken as CheckpointTaken
from .spec.context import WorkerContext as WorkerContext
from .spec.layout import Layout as Layout
from .spec.options import Devices as Devices
from .spec.options import ExecutorSpec as ExecutorSpec
from .spec.options import Launch as Launch
from .spec.options import Limits as Limits
from .spec.options import RestartPolicy as RestartPolicy
from .spec.options import StopPolicy as StopPolicy
from .spec.options import group_of as group_of
from .spec.results import Emitted as Emitted
from .spec.results import Outcome as Outcome
from .spec.results import OutcomeKind as OutcomeKind
from .spec.results import Status as Status
from .spec.worker import Proxy as Proxy
from .spec.worker import RemoteMethod as RemoteMethod
from .spec.worker import WorkerActor as WorkerActor
from .spec.worker import idempotent as idempotent
from .spec.worker import limits as limits
from .spec.worker import method as method
from .spec.worker import step as step
