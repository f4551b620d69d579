"""Options of an executor, checked and complete.

What an executor is to be: checked when it is built, before anything starts.

Guarantees: a spec that exists makes sense: its sizes agree, its class is a worker class, its
arguments have been pickled.

How the worker object of each rank is built: checked, and pickled, in the driver.

Guarantees: a recipe that exists can be called, and has been pickled; nothing of the worker has run.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from phalanx.runtime import (
    DevicePool,
    ReportFolder,
    Transport,
    Visibility,
    Zmq,
    check_folder,
    check_share,
    check_transport,
    encode,
    encode_by_value,
)
from phalanx.supervision import (
    BackOff,
    BadArguments,
    Decider,
    Intensity,
    NotPicklable,
    Restart,
    SpecError,
    Strategy,
)

from .adaptive_spin import Spinning, check_spin
from .checkpoint_policy import CheckpointPolicy
from .layout import Layout
from .validate import (
    check_choice,
    check_count,
    check_env,
    check_kind,
    check_limit,
    check_per_rank,
    check_seconds,
    check_word,
)
from .worker import HOOKS, WorkerActor


def check_worker(worker: object) -> type[WorkerActor]:
    """Return *worker* if it is a worker class."""
    given = worker
    if not (isinstance(worker, type) and issubclass(worker, WorkerActor)):
        raise SpecError("worker", given, "give a class derived from phalanx.WorkerActor")
    if worker is WorkerActor or inspect.isabstract(worker):
        raise SpecError("worker", worker, "give a concrete class with methods of its own")
    for hook in sorted(HOOKS):
        if inspect.iscoroutinefunction(getattr(worker, hook)):
            text = f"{worker.__qualname__}.{hook} is async; a worker's hooks are plain methods"
            raise SpecError("worker", worker, text)
    if inspect.getattr_static(worker, "ctx") is not inspect.getattr_static(WorkerActor, "ctx"):
        text = f"rename {worker.__qualname__}.ctx: phalanx sets that attribute"
        raise SpecError("worker", worker, text)
    return worker


def check_arguments(args: object, kwargs: object) -> None:
    """Raise unless *args* are positional arguments, and *kwargs* is None or keyword arguments."""
    if not isinstance(args, list | tuple):
        raise SpecError("args", args, "give the constructor's positional arguments as a tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError("kwargs", kwargs, "give the constructor's keyword arguments as a mapping")
    named = cast("Mapping[object, Any]", kwargs or {})
    if not all(isinstance(key, str) for key in named):
        raise SpecError("kwargs", named, "name the constructor's arguments by text")


def check_constructor(
    worker: type[WorkerActor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    own: object,
    rank: int,
) -> None:
    """Raise `BadArguments` unless the worker can be built so on *rank*."""
    named = {**kwargs, **_named(own, rank)}
    try:
        signature = inspect.signature(worker)
    except (TypeError, ValueError):  # built in C, or by a metaclass: the worker will tell
        return
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        msg = f"{worker.__qualname__}{signature} on rank {rank}: {error}"
        raise BadArguments(msg) from None


def factory_of(
    worker: type[WorkerActor], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """Return the pickled recipe for one worker object.

    Raises:
        NotPicklable: naming the class or the argument that cannot travel.
    """
    encode_by_value(worker, f"worker={worker!r}")
    for index, value in enumerate(args):
        encode_by_value(value, f"args[{index}]={value!r}")
    for key, value in (kwargs or {}).items():
        encode_by_value(value, f"kwargs[{key!r}]={value!r}")
    return encode_by_value((worker, tuple(args), dict(kwargs or {})), "the constructor's arguments")


def culprit(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], error: NotPicklable
) -> NotPicklable:
    """Return *error*, why a call of *name* cannot travel, with the argument that is to blame."""
    named = {f"args[{index}]": value for index, value in enumerate(args)}
    named |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
    for field, value in named.items():
        if isinstance(value, Future | asyncio.Future):
            return NotPicklable(f"{field} of {name} is a future: pass its result()")
        try:
            encode(value, f"{field}={value!r} of {name}")
        except NotPicklable as own:
            return own
    return error


class Source:
    """The file that workers import *worker* from, where they do: each start reads it anew.

    Attributes:
        file: Its path; None where the class travels by value.
    """

    def __init__(self, worker: type[WorkerActor]) -> None:
        is_named = worker.__module__ != "__main__" and "<locals>" not in worker.__qualname__
        found = getattr(sys.modules.get(worker.__module__), "__file__", None)
        self.file: str | None = found if is_named else None
        self._stamp = self._look()

    def has_changed(self) -> bool:
        """Whether it is another than when this was asked last, or than at first."""
        before, self._stamp = self._stamp, self._look()
        return before != self._stamp

    def _look(self) -> tuple[int, int, int] | None:
        if self.file is None:
            return None
        try:
            known = Path(self.file).stat()
        except OSError:
            return None
        return known.st_ino, known.st_mtime_ns, known.st_size


def keywords_of(rank: int, own: object) -> bytes:
    """Return the pickled keyword arguments that *rank* has of its own."""
    return encode_by_value(_named(own, rank), f"rank_kwargs[{rank}]={own!r}")


def _named(own: object, rank: int) -> dict[str, Any]:
    if not isinstance(own, Mapping):
        raise SpecError(f"rank_kwargs[{rank}]", own, "give a mapping of keyword arguments")
    named = dict(cast("Mapping[object, Any]", own))
    if not all(isinstance(key, str) for key in named):
        raise SpecError(f"rank_kwargs[{rank}]", named, "name the arguments by text")
    return cast("dict[str, Any]", named)


Launch = Literal["zygote", "exec", "inline"]
Survivors = Literal["restart", "keep"]
_names = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolicy:
    """How a rank is stopped: ask, wait, SIGTERM, wait, SIGKILL of its whole process tree.

    Attributes:
        ask: Seconds to finish the calls it has been sent and run `on_stop`.
        terminate: Seconds from SIGTERM to SIGKILL.
        hurry: Seconds from SIGTERM to SIGKILL for a survivor of a broken group, which may be
            stuck in a collective operation with a rank that is gone. 0 kills at once.
        drain: Seconds that the calls made so far get, before any rank is asked to stop, where
            SIGTERM ends the program. ``docker stop`` allows 10 seconds for all of it.
    """

    ask: float = 5.0
    terminate: float = 2.0
    hurry: float = 0.25
    drain: float = 10.0

    def __post_init__(self) -> None:
        for name in ("ask", "terminate", "hurry", "drain"):
            check_seconds(f"stop.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec:
    """What an executor is to be. See `Executor` for the meaning of the fields."""

    worker: type[WorkerActor]
    name: str
    world_size: int
    layout: Layout
    is_plain: bool
    factory: bytes
    keywords: tuple[bytes, ...]
    env: Mapping[str, str]
    rank_env: Sequence[Mapping[str, str]]
    strategy: Strategy
    intensity: Intensity
    restart: Restart
    backoff: BackOff | None
    devices: Any
    devices_per_rank: float
    visibility: Visibility
    device_timeout: float | None
    decider: Decider | None
    decider_blob: bytes
    preload: tuple[str, ...]
    launch: Launch
    start_timeout: float
    stop: StopPolicy
    queue_depth: int
    async_output: bool
    report_dir: ReportFolder | None
    hang_after: float | None
    stopped_after: float | None
    standby: int
    survivors: Survivors
    leave_within: float
    transport: Zmq | None
    checkpoint: CheckpointPolicy | None
    snapshots: Path | None
    spin: Spinning


def spec_of(
    worker: type[WorkerActor],
    world_size: int | None,
    *,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    rank_kwargs: Sequence[Mapping[str, Any]] | None,
    tensor: int | None,
    pipeline: int | None,
    prefill_context: int | None,
    layout: Layout | None,
    strategy: Strategy | str,
    intensity: Intensity | tuple[int, float],
    restart: Restart | str,
    backoff: BackOff | None,
    devices: Any,
    devices_per_rank: float,
    visibility: Visibility,
    device_timeout: float | None,
    decider: Decider | None,
    preload: Sequence[str],
    launch: Launch,
    env: Mapping[str, str] | None,
    rank_env: Sequence[Mapping[str, str]] | None,
    name: str | None,
    start_timeout: float,
    stop: StopPolicy,
    queue_depth: int,
    async_output: bool,
    report_dir: str | Path | ReportFolder | None,
    hang_after: float | None,
    stopped_after: float | None,
    standby: int,
    survivors: Survivors,
    leave_within: float,
    transport: Transport,
    checkpoint: CheckpointPolicy | None,
    spin: float | None,
) -> ExecutorSpec:
    """Return the spec of what was asked for; the arguments are `Executor`'s.

    Raises:
        SpecError, NotPicklable: naming the argument and its value.
    """
    check_worker(worker)
    sizes = {"tensor": tensor, "pipeline": pipeline, "prefill_context": prefill_context}
    plan, is_plain = _layout_of(world_size, layout, sizes)
    size = plan.world_size
    check_choice("launch", launch, ("zygote", "exec", "inline"))
    if launch == "inline" and size != 1:
        raise SpecError("world_size", size, 'launch="inline" has one rank')
    strategy = check_word("strategy", strategy, Strategy)
    if strategy.has_instances:
        raise SpecError("strategy", strategy, "give one_for_one, one_for_all or rest_for_one")
    restart = check_word("restart", restart, Restart)
    check_kind("stop", stop, StopPolicy)
    if backoff is not None:
        check_kind("backoff", backoff, BackOff)
    _check_name(name)
    _check_modules(preload)
    keywords = check_per_rank("rank_kwargs", _each(rank_kwargs, size), size)
    rank_envs = check_per_rank("rank_env", _each(rank_env, size), size)
    check_arguments(args, kwargs)
    for index, own in enumerate(keywords):
        check_constructor(worker, args, kwargs or {}, own, index)
    if decider is not None:
        check_kind("decider", decider, Decider)
    check_share(devices_per_rank)
    check_choice("visibility", visibility, ("one", "all"))
    _check_checkpoint(checkpoint, worker, launch)
    # More leases than devices is told here.
    DevicePool.of(devices, size, devices_per_rank=devices_per_rank).close()
    return ExecutorSpec(
        worker=worker,
        name=name or f"{worker.__name__.lower()}-{next(_names)}",
        world_size=size,
        layout=plan,
        is_plain=is_plain,
        factory=factory_of(worker, args, kwargs),
        keywords=tuple(keywords_of(i, each) for i, each in enumerate(keywords)),
        env=check_env("env", env),
        rank_env=tuple(check_env(f"rank_env[{i}]", each) for i, each in enumerate(rank_envs)),
        strategy=strategy,
        intensity=_check_intensity(intensity),
        restart=restart,
        backoff=backoff,
        devices=devices,
        devices_per_rank=devices_per_rank,
        visibility=visibility,
        device_timeout=(
            None if device_timeout is None else check_seconds("device_timeout", device_timeout)
        ),
        decider=decider,
        decider_blob=b"" if decider is None else encode_by_value(decider, f"decider={decider!r}"),
        preload=tuple(preload),
        launch=launch,
        start_timeout=check_seconds("start_timeout", start_timeout, positive=True),
        stop=stop,
        queue_depth=check_count("queue_depth", queue_depth),
        async_output=bool(async_output),
        report_dir=_check_reports(report_dir),
        hang_after=check_limit("hang_after", hang_after),
        stopped_after=check_limit("stopped_after", stopped_after),
        standby=_check_standby(standby, worker, rank_kwargs),
        survivors=_check_survivors(survivors, worker, strategy),
        leave_within=check_seconds("leave_within", leave_within, positive=True),
        transport=(zmq := _check_transport(transport, launch)),
        checkpoint=checkpoint,
        snapshots=_check_snapshots(checkpoint),
        spin=check_spin(spin, zmq),
    )


def _check_intensity(intensity: object) -> Intensity:
    given: Any = intensity
    if isinstance(given, list | tuple) and len(cast("Sequence[Any]", given)) == 2:
        given = Intensity(*cast("Sequence[Any]", given))
    if not isinstance(given, Intensity):
        raise SpecError("intensity", intensity, "give an Intensity, or (restarts, seconds)")
    return given


def _check_checkpoint(
    policy: CheckpointPolicy | None, worker: type[WorkerActor], launch: Launch
) -> None:
    if policy is None:
        return
    check_kind("checkpoint", policy, CheckpointPolicy)
    for hook in ("checkpoint", "restore"):
        if getattr(worker, hook) is getattr(WorkerActor, hook):
            raise SpecError("checkpoint", policy, f"needs {worker.__name__}.{hook}")
    if launch == "inline":
        raise SpecError("checkpoint", policy, "an inline rank has no process to outlive")


def _check_snapshots(policy: CheckpointPolicy | None) -> Path | None:
    if policy is None or policy.where is None:
        return None
    return check_folder("checkpoint.where", policy.where)


def _check_standby(standby: object, worker: type[WorkerActor], rank_kwargs: object) -> int:
    count = check_count("standby", standby, 0)
    if count and rank_kwargs is not None and worker.on_standby is not WorkerActor.on_standby:
        raise SpecError(
            "rank_kwargs",
            rank_kwargs,
            "a spare builds its object for on_standby before it has a rank; read ctx.rank instead",
        )
    return count


def _check_transport(transport: Transport, launch: Launch) -> Zmq | None:
    options = check_transport(transport)
    if options is not None and launch == "inline":
        raise SpecError("transport", transport, 'launch="inline" sends no messages')
    return options


def _check_survivors(
    survivors: Survivors, worker: type[WorkerActor], strategy: Strategy
) -> Survivors:
    check_choice("survivors", survivors, ("restart", "keep"))
    if survivors == "keep":
        if strategy is not Strategy.ONE_FOR_ALL:
            raise SpecError("survivors", survivors, f"needs one_for_all, not {strategy}")
        if worker.on_reform is WorkerActor.on_reform:
            raise SpecError("survivors", survivors, f"needs {worker.__name__}.on_reform")
    return survivors


def _layout_of(
    world_size: int | None, layout: Layout | None, sizes: Mapping[str, int | None]
) -> tuple[Layout, bool]:
    """Return the layout, and whether none was asked for."""
    given = {name: size for name, size in sizes.items() if size is not None}
    if world_size is not None:
        check_count("world_size", world_size)
    if layout is not None:
        check_kind("layout", layout, Layout)
        if given:
            raise SpecError("layout", layout, f"give either it or {', '.join(given)}, not both")
    elif given:
        layout = Layout(
            tensor=given.get("tensor", 1),
            pipeline=given.get("pipeline", 1),
            prefill_context=given.get("prefill_context", 1),
        )
    else:
        return Layout(tensor=1 if world_size is None else world_size), True
    if world_size is not None:
        layout.check(world_size)
    return layout, False


def _each(values: Sequence[Mapping[str, Any]] | None, size: int) -> Sequence[Mapping[str, Any]]:
    return [{} for _ in range(size)] if values is None else values


def _check_name(name: object) -> None:
    if name is not None and (not isinstance(name, str) or not name or "\0" in name):
        raise SpecError("name", name, "give a text that is not empty")


def _check_modules(preload: object) -> None:
    given = preload
    if not isinstance(preload, list | tuple) or not all(
        isinstance(each, str) for each in cast("Sequence[object]", preload)
    ):
        raise SpecError("preload", given, "give a list or tuple of module names")


def _check_reports(given: object) -> ReportFolder | None:
    """Return the folder that was given; None for the one of the surroundings, checked as well."""
    if given is not None:
        return ReportFolder.of("report_dir", given)
    ReportFolder.from_environment()
    return None


def layout_for(
    spec: ExecutorSpec, world_size: int, layout: Layout | None, *, now: Layout
) -> Layout:
    """Return how *world_size* ranks are laid out in place of *now*, in the executor of *spec*.

    Raises:
        SpecError: it cannot have so many, or not without a *layout*.
    """
    check_count("world_size", world_size)
    if layout is None:
        if not spec.is_plain:
            raise SpecError("layout", None, "say how the new ranks are laid out")
        layout = Layout(tensor=world_size)
    layout.check(world_size)
    if spec.launch == "inline" and world_size != 1:
        raise SpecError("world_size", world_size, 'launch="inline" has one rank')
    DevicePool.of(spec.devices, world_size, devices_per_rank=spec.devices_per_rank).close()
    together = spec.checkpoint is not None and spec.strategy is not Strategy.ONE_FOR_ONE
    reshards = spec.worker.reshard is not WorkerActor.reshard
    if together and not reshards and world_size != now.world_size:
        raise SpecError(
            "world_size",
            world_size,
            f"what is kept is the state of {now.world_size} ranks; "
            f"give {spec.worker.__name__} a method reshard(states)",
        )
    return layout
