"""Doing it: processes, descriptors, sockets and clocks."""

from __future__ import annotations

from phalanx.runtime.checkpoint.snapshot import (
    SnapshotName,
    Stamp,
    join_snapshots,
    load_snapshot,
    store_snapshot,
)
from phalanx.runtime.checkpoint.store import SnapshotFolder, check_folder
from phalanx.runtime.devices.device import DeviceStatus
from phalanx.runtime.devices.events import DeviceAwaited, DeviceQuarantined, DeviceRestored
from phalanx.runtime.devices.gpu import Fault, Gpu, GpuInventory
from phalanx.runtime.devices.inventory import find_gpus
from phalanx.runtime.devices.lease import Lease, Request, Visibility, check_share
from phalanx.runtime.devices.pool import DevicePool
from phalanx.runtime.distributed.gloo import end_gloo_connections
from phalanx.runtime.distributed.rendezvous import (
    Rendezvous,
    RendezvousStore,
    init_process_group,
    rendezvous_environment,
)
from phalanx.runtime.linux import descriptor_limit, descriptors
from phalanx.runtime.linux.cgroup import usable_processors
from phalanx.runtime.linux.oom import oom_sources
from phalanx.runtime.linux.process_tree import VARIABLE as MARK
from phalanx.runtime.linux.process_tree import Quarry, Task, TreeReport
from phalanx.runtime.linux.process_tree import find as find_tree
from phalanx.runtime.linux.process_tree import kill as kill_tree
from phalanx.runtime.linux.process_tree import read as read_task
from phalanx.runtime.linux.process_tree import read_all as read_tasks
from phalanx.runtime.memory.arena import ARENA_IDLE, ARENA_LONGEST, Arena
from phalanx.runtime.memory.budget import writable_bytes
from phalanx.runtime.memory.exchange import DriverExchange, WorkerExchange
from phalanx.runtime.memory.shared_lock import LockHolder, LockTable, SharedLock
from phalanx.runtime.observe.crash_report import (
    CallFate,
    CallInProgress,
    CrashReport,
    ExitEvidence,
    Fate,
)
from phalanx.runtime.observe.diagnostics import (
    STACKS,
    Vitals,
    describe_threads,
    install_last_words,
    read_stacks,
    size_of,
)
from phalanx.runtime.observe.events import (
    GroupDown,
    GroupEnded,
    GroupUp,
    ReportNotWritten,
    WorkerCrashed,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from phalanx.runtime.observe.labels import WorkerLabels
from phalanx.runtime.observe.log_channel import LEVELS, LogChannel, LoggingBridge, worker_logger
from phalanx.runtime.observe.render import render, safe_text
from phalanx.runtime.observe.report_store import ReportFile, ReportFolder, read_report
from phalanx.runtime.observe.status import ChildGlance, GroupGlance, RankGlance, TreeGlance
from phalanx.runtime.observe.stream import DriverStream, Observer, find_drivers
from phalanx.runtime.output.collector import Scribe
from phalanx.runtime.output.worker_output import WorkerOutput
from phalanx.runtime.process.launcher import Launcher, LaunchSpec
from phalanx.runtime.process.process import Process, ProcessStatus, exit_of_process
from phalanx.runtime.remote.driver_relay import (
    Gateway,
    GatewayExited,
    MessageMalformed,
    StrangerRefused,
)
from phalanx.runtime.remote.options import Transport, Zmq, check_transport
from phalanx.runtime.remote.worker_relay import Outpost
from phalanx.runtime.threads.event_loop import Hub, Timer, Watch
from phalanx.runtime.threads.reentrant_lock import (
    AskableLock,
    OwnedLock,
    ReentrantLock,
    called_from_inside,
    is_holding,
    occupied,
)
from phalanx.runtime.wire.channel import Arrival, Channel, SocketChannel
from phalanx.runtime.wire.codec import Encoded, decode, encode, encode_by_value
from phalanx.runtime.wire.frame import FarFrame, Frame, bundle, call_id_of, receive, send
from phalanx.runtime.wire.message import Payload, call_packet
from phalanx.runtime.wire.progress_page import Board, withdraw
from phalanx.runtime.wire.protocol import BUNDLE_LIMIT, EVERY_RANK, Flag, Kind
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.runtime.wire.spinner import Spinner
from phalanx.runtime.wire.tensors import land_on
from phalanx.runtime.worker.control import Boot, Link, Pulse
from phalanx.runtime.worker.replies import AsyncOutput
from phalanx.runtime.worker.standby import Assignment, await_assignment
from phalanx.runtime.worker.termination import is_in_process_group
from phalanx.runtime.worker.tracing import ServerSpan, Telemetry, carried, outside, within

from .event import LoggedEvent, fields
from .runtime import Runtime, acquire_shared, check_machine, release_shared

__all__ = [
    "ARENA_IDLE",
    "ARENA_LONGEST",
    "BUNDLE_LIMIT",
    "EVERY_RANK",
    "LEVELS",
    "MARK",
    "STACKS",
    "Arena",
    "Arrival",
    "AskableLock",
    "Assignment",
    "AsyncOutput",
    "Board",
    "Boot",
    "CallFate",
    "CallInProgress",
    "Channel",
    "ChildGlance",
    "CrashReport",
    "DeviceAwaited",
    "DevicePool",
    "DeviceQuarantined",
    "DeviceRestored",
    "DeviceStatus",
    "DriverExchange",
    "DriverStream",
    "Encoded",
    "ExitEvidence",
    "FarFrame",
    "Fate",
    "Fault",
    "Flag",
    "Frame",
    "Gateway",
    "GatewayExited",
    "Gpu",
    "GpuInventory",
    "GroupDown",
    "GroupEnded",
    "GroupGlance",
    "GroupUp",
    "Hub",
    "Kind",
    "LaunchSpec",
    "Launcher",
    "Lease",
    "Link",
    "LockHolder",
    "LockTable",
    "LogChannel",
    "LoggedEvent",
    "LoggingBridge",
    "MessageMalformed",
    "Observer",
    "Outpost",
    "OwnedLock",
    "Payload",
    "Process",
    "ProcessStatus",
    "Pulse",
    "Quarry",
    "RankGlance",
    "ReentrantLock",
    "RemoteFailure",
    "Rendezvous",
    "RendezvousStore",
    "ReportFile",
    "ReportFolder",
    "ReportNotWritten",
    "Request",
    "Runtime",
    "Scribe",
    "ServerSpan",
    "SharedLock",
    "SnapshotFolder",
    "SnapshotName",
    "SocketChannel",
    "Spinner",
    "Stamp",
    "StrangerRefused",
    "Task",
    "Telemetry",
    "Timer",
    "Transport",
    "TreeGlance",
    "TreeReport",
    "Visibility",
    "Vitals",
    "Watch",
    "WorkerCrashed",
    "WorkerExchange",
    "WorkerExited",
    "WorkerLabels",
    "WorkerOutput",
    "WorkerReady",
    "WorkerStarted",
    "Zmq",
    "acquire_shared",
    "await_assignment",
    "bundle",
    "call_id_of",
    "call_packet",
    "called_from_inside",
    "carried",
    "check_folder",
    "check_machine",
    "check_share",
    "check_transport",
    "decode",
    "describe_threads",
    "descriptor_limit",
    "descriptors",
    "encode",
    "encode_by_value",
    "end_gloo_connections",
    "exit_of_process",
    "fields",
    "find_drivers",
    "find_gpus",
    "find_tree",
    "init_process_group",
    "install_last_words",
    "is_holding",
    "is_in_process_group",
    "join_snapshots",
    "kill_tree",
    "land_on",
    "load_snapshot",
    "occupied",
    "oom_sources",
    "outside",
    "read_report",
    "read_stacks",
    "read_task",
    "read_tasks",
    "receive",
    "release_shared",
    "render",
    "rendezvous_environment",
    "safe_text",
    "send",
    "size_of",
    "store_snapshot",
    "usable_processors",
    "withdraw",
    "within",
    "worker_logger",
    "writable_bytes",
]
