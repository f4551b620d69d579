"""The events that `Executor.subscribe` and `Supervisor.subscribe` hand on."""

from phalanx.actors import CheckpointFailed as CheckpointFailed
from phalanx.actors import CheckpointRejected as CheckpointRejected
from phalanx.actors import CheckpointRestored as CheckpointRestored
from phalanx.actors import CheckpointTaken as CheckpointTaken
from phalanx.actors import Emitted as Emitted
from phalanx.actors import StandbyLost as StandbyLost
from phalanx.runtime import DeviceAwaited as DeviceAwaited
from phalanx.runtime import DeviceQuarantined as DeviceQuarantined
from phalanx.runtime import DeviceRestored as DeviceRestored
from phalanx.runtime import GroupDown as GroupDown
from phalanx.runtime import GroupEnded as GroupEnded
from phalanx.runtime import GroupUp as GroupUp
from phalanx.runtime import WorkerCrashed as WorkerCrashed
from phalanx.runtime import WorkerExited as WorkerExited
from phalanx.runtime import WorkerReady as WorkerReady
from phalanx.runtime import WorkerStarted as WorkerStarted
from phalanx.supervision import ChildExited as ChildExited
from phalanx.supervision import ChildLost as ChildLost
from phalanx.supervision import ChildStarted as ChildStarted
from phalanx.supervision import ChildStartFailed as ChildStartFailed
from phalanx.supervision import SupervisorBegan as SupervisorBegan
from phalanx.supervision import SupervisorExited as SupervisorExited
from phalanx.supervision import SupervisorGaveUp as SupervisorGaveUp
from phalanx.supervision import SupervisorReady as SupervisorReady
from phalanx.supervision import SupervisorStartFailed as SupervisorStartFailed
