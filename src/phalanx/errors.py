"""The errors that phalanx raises: one tree, split by whose fault it is."""

from phalanx.supervision import AddressNotReached as AddressNotReached
from phalanx.supervision import BadArguments as BadArguments
from phalanx.supervision import CallerError as CallerError
from phalanx.supervision import CallTimeout as CallTimeout
from phalanx.supervision import ChildRefused as ChildRefused
from phalanx.supervision import ExecutorClosed as ExecutorClosed
from phalanx.supervision import LockNotHeld as LockNotHeld
from phalanx.supervision import LockTimeout as LockTimeout
from phalanx.supervision import MessageTooLarge as MessageTooLarge
from phalanx.supervision import MissingPackage as MissingPackage
from phalanx.supervision import NodeRefused as NodeRefused
from phalanx.supervision import NoDevice as NoDevice
from phalanx.supervision import NoNode as NoNode
from phalanx.supervision import NotPicklable as NotPicklable
from phalanx.supervision import PhalanxError as PhalanxError
from phalanx.supervision import RemoteError as RemoteError
from phalanx.supervision import RuntimeFault as RuntimeFault
from phalanx.supervision import SpecError as SpecError
from phalanx.supervision import StartFailed as StartFailed
from phalanx.supervision import StreamNotTaken as StreamNotTaken
from phalanx.supervision import SupervisorDown as SupervisorDown
from phalanx.supervision import Unhealthy as Unhealthy
from phalanx.supervision import UnknownMethod as UnknownMethod
from phalanx.supervision import WorkerDied as WorkerDied
from phalanx.supervision import WorkerError as WorkerError
from phalanx.supervision import WouldDeadlock as WouldDeadlock
