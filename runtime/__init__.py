"""Doing it: processes, descriptors, sockets and clocks."""

from __future__ import annotations

from . import descriptors, ledger
from .arena import ARENA_IDLE, ARENA_LONGEST, Arena
from .arena_exchange import DriverExchange, WorkerExchange
from .assignment import Assignment, await_assignment
from .board import Board, withdraw
from .channel import Arrival, Channel, SocketChannel
from .circumstances import CallFate, CallInProgress, ExitEvidence, Fate
from .codec import Encoded, decode, encode, encode_by_value
from .console import render, safe_text
from .device_events import DeviceAwaited, DeviceQuarantined, DeviceRestored
from .devices import DevicePool
from .doom import is_in_process_group
from .events import (
    GroupDown,
    GroupEnded,
    GroupUp,
    LoggedEvent,
    ReportNotWritten,
    WorkerCrashed,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    fields,
)
from .evidence import oom_sources
from .frames import FarFrame, Frame, bundle, call_id_of, receive, send
from .gateway import Gateway, GatewayExited, MessageMalformed, StrangerRefused
from .glances import ChildGlance, GroupGlance, RankGlance, TreeGlance
from .gloo import end_gloo_connections
from .gpus import Fault, Gpu, GpuInventory
from .hub import Hub, Timer, Watch
from .inventory import find_gpus
from .labels import WorkerLabels
from .last_words import install_last_words
from .launcher import Launcher, LaunchSpec
from .lease import Lease, Request, Visibility, check_share
from .link import Boot, Link
from .locks import LockHolder, LockTable, SharedLock
from .logs import LEVELS, LogChannel, LoggingBridge, worker_logger
from .marks import VARIABLE as MARK
from .memory import writable_bytes
from .outpost import Outpost
from .owned_lock import (
    AskableLock,
    OwnedLock,
    ReentrantLock,
    called_from_inside,
    is_holding,
    occupied,
)
from .payload import Payload, call_packet
from .process import Process, ProcessStatus
from .processors import usable_processors
from .pulse import Pulse
from .remote_failure import RemoteFailure
from .rendezvous import Rendezvous, RendezvousStore, init_process_group, rendezvous_environment
from .replies import AsyncOutput
from .report import CrashReport
from .report_folder import ReportFile, ReportFolder, read_report
from .runtime import Runtime, acquire_shared, check_machine, release_shared
from .scribe import Scribe
from .slot import DeviceStatus
from .snapshot_folder import SnapshotFolder, check_folder
from .snapshots import SnapshotName, Stamp, join_snapshots, load_snapshot, store_snapshot
from .spinning import Spinner
from .stacks import STACKS, Vitals, describe_threads, read_stacks, size_of
from .status import exit_of_process
from .stream import DriverStream, Observer, find_drivers
from .telemetry import ServerSpan, Telemetry, carried, outside, within
from .tensors import land_on
from .transport import Transport, Zmq, check_transport
from .tree import Quarry, Task, TreeReport
from .tree import find as find_tree
from .tree import kill as kill_tree
from .tree import read as read_task
from .tree import read_all as read_tasks
from .wire import BUNDLE_LIMIT, EVERY_RANK, Flag, Kind
from .worker_output import WorkerOutput

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
    "ledger",
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
