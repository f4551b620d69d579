"""Phalanx: supervised GPU worker actors.

Errors are in `phalanx.errors`, events in `phalanx.events`. Importing the package imports none of
its layers; a public name is imported when it is first used: pytest loads the plug-in
`phalanx.testing`, and with it this package, wherever phalanx is installed.
"""

import typing

__version__: str

if typing.TYPE_CHECKING:
    from phalanx.actors import (
        AsyncOutput,
        CallFuture,
        CheckpointPolicy,
        CrashReport,
        Devices,
        Executor,
        Launch,
        Layout,
        Limits,
        Outcome,
        ReplyStream,
        RestartPolicy,
        Status,
        StopPolicy,
        Supervisor,
        WorkerActor,
        WorkerContext,
        executor_child,
        method,
        tree_from_toml,
        worker_child,
    )
    from phalanx.cluster import JoinedNodes, Ray
    from phalanx.runtime import DevicePool, Runtime
    from phalanx.supervision import (
        BackOff,
        ChildSpec,
        Decider,
        Directive,
        ExitReason,
        Intensity,
        PhalanxError,
        Restart,
        Rule,
        Strategy,
        SupervisorSpec,
    )

__all__ = [
    "AsyncOutput",
    "BackOff",
    "CallFuture",
    "CheckpointPolicy",
    "ChildSpec",
    "CrashReport",
    "Decider",
    "DevicePool",
    "Devices",
    "Directive",
    "Executor",
    "ExitReason",
    "Intensity",
    "JoinedNodes",
    "Launch",
    "Layout",
    "Limits",
    "Outcome",
    "PhalanxError",
    "Ray",
    "ReplyStream",
    "Restart",
    "RestartPolicy",
    "Rule",
    "Runtime",
    "Status",
    "StopPolicy",
    "Strategy",
    "Supervisor",
    "SupervisorSpec",
    "WorkerActor",
    "WorkerContext",
    "executor_child",
    "method",
    "tree_from_toml",
    "worker_child",
]

# Names that were here -> where they are. They go with the next release.
_MOVED = {
    "errors": (
        "BadArguments CallTimeout CallerError ExecutorClosed LockNotHeld LockTimeout "
        "MessageTooLarge NoDevice NotPicklable RemoteError RuntimeFault SpecError StartFailed "
        "StreamNotTaken Unhealthy UnknownMethod WorkerDied WorkerError WouldDeadlock"
    ),
    "events": (
        "CheckpointFailed CheckpointRejected CheckpointRestored CheckpointTaken DeviceAwaited "
        "DeviceQuarantined DeviceRestored Emitted GroupDown GroupEnded GroupUp WorkerCrashed "
        "WorkerExited WorkerReady WorkerStarted"
    ),
    "actors": "Checkpoint OutcomeKind RankInfo idempotent limits step",
    "runtime": "DeviceStatus Fault Lease LockHolder ReportFolder SharedLock Zmq",
    "supervision": "ExitKind GPU_WORKER",
}

if not typing.TYPE_CHECKING:
    import importlib
    import warnings

    def __getattr__(name: str) -> object:
        """Import the public name, the module, or the name that was public, *name*."""
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version(__name__)
        layers = ("actors", "runtime", "supervision", "cluster")
        if name in (*layers, "errors", "events"):
            return importlib.import_module(f"{__name__}.{name}")
        for layer in layers if name in __all__ else ():
            found = vars(importlib.import_module(f"{__name__}.{layer}"))
            if name in found:
                return globals().setdefault(name, found[name])
        for module, names in _MOVED.items():
            if name in names.split():
                text = f"phalanx: phalanx.{name} is deprecated: import it from phalanx.{module}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "__version__"})
