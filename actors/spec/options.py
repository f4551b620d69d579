"""Options of an executor: each is declared once, in a frozen group, and checked when it is built.

- Every value is valid once built; an error names group, field, value and remedy.
- A mapping of its fields, such as a table in TOML, is accepted in place of each group.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from phalanx.cluster import ClusterOptions
from phalanx.runtime import (
    DevicePool,
    ReportFolder,
    Transport,
    Visibility,
    Zmq,
    check_folder,
    check_share,
    check_transport,
    encode_by_value,
    read_at_start,
)
from phalanx.supervision import (
    BackOff,
    Decider,
    Intensity,
    Restart,
    SpecError,
    Strategy,
    check_choice,
    check_count,
    check_kind,
    check_limit,
    check_seconds,
    check_word,
    is_installed,
)

from .checkpoint_policy import CheckpointPolicy
from .factory import check_worker, factory_of, keywords, keywords_of
from .layout import Layout
from .worker import WorkerActor

if TYPE_CHECKING:
    from pathlib import Path

Survivors = Literal["restart", "keep"]
LaunchMethod = Literal["zygote", "exec", "inline"]
Stdio = Literal["collect", "inherit"]
_F = TypeVar("_F", bound=Callable[..., Any])
_G = TypeVar("_G")
_INTENSITY = Intensity(3, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Which ranks are restarted after a death, how often, and how soon.

    Attributes:
        strategy: Which ranks are restarted with one that died. `ONE_FOR_ALL` for ranks that share a
            process group; `ONE_FOR_ONE` for independent replicas. Its name is accepted too.
        intensity: Restarts allowed, and in how many seconds; one more ends the group. Or a pair.
        restart: The exits of a rank after which it is restarted. Any other exit ends the group.
        backoff: Delay before consecutive restarts; None for none.
        decider: The reaction to an exception of a method, by its type, name or a
            predicate: *resume* (the default), *restart* the process, *stop* the group or
            *escalate*; and to a rank's exits, in place of *restart*. The caller gets the
            exception first, unless the call is to be sent again. A rule's *child* is the rank, as
            text. None restarts a rank after CUDA errors that leave its process unusable, and
            resumes after all others, running out of memory included.
        survivors: The other ranks of a process group, under `ONE_FOR_ALL`, when one has
            died: ``"restart"`` starts all of them anew; ``"keep"`` replaces the dead one only,
            and has the others leave the old process group and run `on_reform`. For gloo and NCCL.
        leave_within: Seconds in which a survivor has to end its call and leave the old process
            group; past that it is replaced as well. Groups are aborted after 0.25.
        standby: The number of warm spare processes: everything is imported and `on_standby`
            has run. One takes the place of a rank that died at once; another follows it.
        report_dir: Where crash reports are also written as files: a folder, or a `ReportFolder`,
            which also limits their number. None takes the runtime's, then that in the variable
            ``PHALANX_REPORT_DIR``, and else writes none.
    """

    strategy: Strategy = Strategy.ONE_FOR_ALL
    intensity: Intensity = _INTENSITY
    restart: Restart = Restart.PERMANENT
    backoff: BackOff | None = None
    decider: Decider | None = None
    survivors: Survivors = "restart"
    leave_within: float = 10.0
    standby: int = 0
    report_dir: str | Path | ReportFolder | None = None

    def __post_init__(self) -> None:
        strategy = check_word("policy.strategy", self.strategy, Strategy)
        if strategy.has_instances:
            remedy = "give one_for_one, one_for_all or rest_for_one"
            raise SpecError("policy.strategy", strategy, remedy)
        check_choice("policy.survivors", self.survivors, ("restart", "keep"))
        if self.survivors == "keep" and strategy is not Strategy.ONE_FOR_ALL:
            raise SpecError("policy.survivors", "keep", f"needs one_for_all, not {strategy}")
        if self.decider is not None:
            check_kind("policy.decider", self.decider, Decider)
        intensity: object = self.intensity
        backoff: object = self.backoff
        if isinstance(intensity, list | tuple) and len(cast("Sequence[object]", intensity)) == 2:
            try:
                intensity = Intensity(*cast("Sequence[Any]", intensity))
            except SpecError as error:
                remedy = f"{error.field}: {error.remedy}"
                raise SpecError("policy.intensity", intensity, remedy) from None
        _set(
            self,
            strategy=strategy,
            intensity=group_of("policy.intensity", Intensity, intensity),
            restart=check_word("policy.restart", self.restart, Restart),
            backoff=None if backoff is None else group_of("policy.backoff", BackOff, backoff),
            leave_within=check_seconds("policy.leave_within", self.leave_within, positive=True),
            standby=check_count("policy.standby", self.standby, 0),
            report_dir=None
            if self.report_dir is None
            else ReportFolder.of("policy.report_dir", self.report_dir),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Which devices the ranks get.

    Attributes:
        names: A `DevicePool` that several executors share; or the devices to choose from, by
            index or UUID, possibly repeated; or ``"cpu"``, ``"cuda"``; or None, or ``"auto"``, for
            the GPUs that are visible, else CPU slots. Executors of one runtime that name the same
            devices share them.
        per_rank: The number of devices of each rank; or a part of one, such as 0.25, and
            then that many ranks share it.
        visibility: ``"one"``: a rank sees only the devices leased to it. ``"all"``: it
            sees all devices to choose from, each under the same name in every rank; its own are
            `WorkerContext.devices`.
        timeout: Seconds that a restart waits while there is no device for it: every one is
            leased to others, or in quarantine. Then the group ends. None waits without limit, 0
            not at all. The first start waits only for memory that is just being released.
    """

    names: Any = None
    per_rank: float = 1
    visibility: Visibility = "one"
    timeout: float | None = 30.0

    def __post_init__(self) -> None:
        check_share(self.per_rank)
        check_choice("devices.visibility", self.visibility, ("one", "all"))
        if self.timeout is not None:
            _set(self, timeout=check_seconds("devices.timeout", self.timeout))

    def check(self, world_size: int) -> None:
        """Raise a `SpecError` if there are too few for *world_size* ranks."""
        DevicePool.of(self.names, world_size, devices_per_rank=self.per_rank).close()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolicy:
    """How a rank is stopped: ask, wait, SIGTERM, wait, SIGKILL of its whole process tree.

    Attributes:
        ask: Seconds to finish the calls it has been sent and run `on_stop`.
        terminate: Seconds from SIGTERM to SIGKILL.
        hurry: Seconds from SIGTERM to SIGKILL for a survivor of a broken group, which may be
            stuck in a collective operation with a rank that has died. 0 kills at once.
        drain: Seconds that the calls made so far get, before any rank gets a stop request, when
            SIGTERM ends the program. ``docker stop`` allows 10 seconds for all of it.
    """

    ask: float = 5.0
    terminate: float = 2.0
    hurry: float = 0.25
    drain: float = 10.0

    def __post_init__(self) -> None:
        for each in fields(self):
            check_seconds(f"limits.stop.{each.name}", getattr(self, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits, and the number of calls in flight.

    Attributes:
        start: Seconds from a rank's start to READY.
        hang: Seconds a call may run on a rank before that rank counts as hung: its stacks are
            captured, and it is killed. None sets no limit but those that methods declare.
        stopped: Seconds a rank that owes an answer, starts, or joins another epoch may be
            stopped (SIGSTOP); None for no limit.
        stop: The stages of a stop.
        queue_depth: The most calls that one rank has been sent and has not answered.
    """

    start: float = 300.0
    hang: float | None = None
    stopped: float | None = 10.0
    stop: StopPolicy = StopPolicy()
    queue_depth: int = 64

    def __post_init__(self) -> None:
        _set(
            self,
            start=check_seconds("limits.start", self.start, positive=True),
            hang=check_limit("limits.hang", self.hang),
            stopped=check_limit("limits.stopped", self.stopped),
            stop=group_of("limits.stop", StopPolicy, self.stop),
            queue_depth=check_count("limits.queue_depth", self.queue_depth),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start method and environment of worker processes.

    Attributes:
        method: ``"zygote"`` forks workers from a warm process, ``"exec"`` starts a fresh
            interpreter for each, ``"inline"`` runs one rank in the caller's own thread: without
            a runtime, variables of its own or spares.
        preload: Modules that the zygote imports once for all workers; by default torch, if it is
            installed. Each rank imports other modules at each
            start: a first ``torch.optim`` optimizer imports ``torch._dynamo``
            (over a second), so give ``("torch", "torch._dynamo")`` and your own modules to train.
        env: Environment variables of every worker, over the driver's at the moment of the start.
            If neither sets ``OMP_NUM_THREADS`` each rank gets its share of the processors that
            the driver may use. What is read only as a program starts (``LD_*``, ``MALLOC_*``,
            ``MIMALLOC_*``, ``TCMALLOC_*``, ``GLIBC_TUNABLES``, ``PYTHON*``) has another zygote
            made, which imports anew, for each set of values.
        rank_env: Further ones for each rank: one mapping per rank, or empty.
        rank_kwargs: Further keyword arguments of the worker's constructor, for each rank, likewise.
        transport: The transport to the ranks: ``"local"`` by sockets and memory that this
            machine's processes share, ``"zmq"`` or a `Zmq` by ZeroMQ with keys made per group, as
            for ranks that share neither.
        stdio: ``"collect"``: stdout and stderr of the workers are read, shown with the rank and
            kept for crash reports; stdin is empty. ``"inherit"``: all three are the driver's, as
            for any child process.
    """

    method: LaunchMethod = "zygote"
    preload: Sequence[str] = field(
        default_factory=lambda: ("torch",) if is_installed("torch") else ()
    )
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    rank_env: Sequence[Mapping[str, str]] = ()
    rank_kwargs: Sequence[Mapping[str, Any]] = ()
    transport: Transport = "local"
    stdio: Stdio = "collect"

    def __post_init__(self) -> None:
        check_choice("launch.method", self.method, ("zygote", "exec", "inline"))
        check_choice("launch.stdio", self.stdio, ("collect", "inherit"))
        modules: object = self.preload
        if not isinstance(modules, list | tuple) or not all(
            isinstance(each, str) for each in cast("Sequence[object]", modules)
        ):
            raise SpecError("launch.preload", modules, "give a list or tuple of module names")
        transport = check_transport(self.transport)
        if transport is not None and self.method == "inline":
            raise SpecError("launch.transport", transport, 'method="inline" sends no messages')
        if transport is not None and self.stdio == "inherit":
            raise SpecError("launch.stdio", self.stdio, 'needs transport="local"')
        for name in ("rank_env", "rank_kwargs"):
            check_per_rank(f"launch.{name}", getattr(self, name), None)
        rank_env = enumerate(self.rank_env)
        _set(
            self,
            preload=tuple(self.preload),
            env=check_env("launch.env", self.env),
            rank_env=tuple(check_env(f"launch.rank_env[{i}]", each) for i, each in rank_env),
            rank_kwargs=tuple(
                keywords(f"launch.rank_kwargs[{i}]", each)
                for i, each in enumerate(self.rank_kwargs)
            ),
            transport=transport or "local",
        )

    def env_of(self, rank: int) -> Mapping[str, str]:
        """Return the variables of *rank*; those of all for -1, which is none yet."""
        own = self.rank_env[rank : rank + 1] if rank >= 0 else ()
        return {**self.env, **own[0]} if own else self.env


def check_per_rank(field: str, values: object, world_size: int | None) -> Sequence[Any]:
    """Return *values* if it is a list or tuple with one entry per rank; None: of any length."""
    if not isinstance(values, list | tuple):
        raise SpecError(field, values, "give a list or tuple with one entry per rank")
    given = cast("Sequence[Any]", values)
    if world_size is not None and len(given) != world_size:
        raise SpecError(
            field, given, f"has {len(given)} entries for {world_size} ranks; give one for each"
        )
    return given


def check_env(field: str, env: object) -> Mapping[str, str]:
    """Return *env* if it is a mapping of text to text that an environment can hold."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise SpecError(field, env, "give a mapping of names to text")
    named = cast("Mapping[object, object]", env)
    for key, value in named.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            raise SpecError(field, key, "a variable's name is text without '=' and NUL")
        if not isinstance(value, str) or "\0" in value:
            raise SpecError(f"{field}[{key!r}]", value, "a variable's value is text without NUL")
    return dict(cast("Mapping[str, str]", named))  # a copy: what is changed later is not checked


def _set(group: object, **values: object) -> None:
    """Set fields of *group*, which is frozen, while it is being built."""
    for name, value in values.items():
        object.__setattr__(group, name, value)


def group_of(
    name: str,
    kind: type[_G],
    given: object,
    over: Mapping[str, Any] = MappingProxyType({}),
    *,
    short: str = "",
    written: Mapping[str, str] = MappingProxyType({}),
) -> _G:
    """Return the options of *kind* that *given* stands for, with the fields *over* put over it.

    Args:
        name: Its name in errors.
        given: None for the defaults, a *kind*, a mapping of its fields, or the value of *short*.
        over: Values of fields.
        short: The field that a value of any other type is for; empty for none.
        written: Names in errors of fields of *over*, if other than the group and the field.
    """
    known = {each.name for each in fields(cast("Any", kind))}
    values: dict[str, Any] = {}
    if isinstance(given, kind):
        if not over:
            return given
        values = {each: getattr(given, each) for each in known}
    elif isinstance(given, Mapping):
        values = dict(cast("Mapping[str, Any]", given))
    elif given is not None:
        if not short:
            check_kind(name, given, kind)
        values, written = {short: given}, {short: name, **written}
    for unknown in values.keys() - known:
        raise SpecError(f"{name}.{unknown}", values[unknown], f"give {', '.join(sorted(known))}")
    try:
        return kind(**{**values, **over})
    except SpecError as error:
        word = written.get(error.field.removeprefix(f"{name}."))
        if word is None:
            raise
        raise SpecError(word, error.value, error.remedy) from None


# Parameter of `Executor` -> the group that it takes, and the field that it is short for.
_GROUPS: dict[str, tuple[type, str]] = {
    "policy": (RestartPolicy, ""),
    "devices": (Devices, "names"),
    "limits": (Limits, ""),
    "launch": (Launch, "method"),
    "layout": (Layout, ""),
}


def replaced_keywords(table: Mapping[str, str]) -> Callable[[_F], _F]:
    """Have a function take old names of its keywords for one more release, with a warning.

    Args:
        table: Old name -> ``group.field``.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for old in given.keys() & table.keys():
                value = given.pop(old)
                name, _, part = table[old].partition(".")
                kind, short = _GROUPS[name]
                if value is not None or part in _NONE_COUNTS:
                    now = given.get(name)
                    over, written = {part: value}, {part: old}
                    given[name] = group_of(name, kind, now, over, short=short, written=written)
                text = f"phalanx: {old}= is deprecated: write {name}={kind.__name__}({part}=...)"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **given)

        return cast("_F", call)

    return decorate


_NONE_COUNTS = {"timeout", "stopped"}  # of which None is a value, and not the default
REPLACED = {
    "tensor": "layout.tensor",
    "pipeline": "layout.pipeline",
    "prefill_context": "layout.prefill_context",
    "backoff": "policy.backoff",
    "decider": "policy.decider",
    "report_dir": "policy.report_dir",
    "survivors": "policy.survivors",
    "leave_within": "policy.leave_within",
    "devices_per_rank": "devices.per_rank",
    "visibility": "devices.visibility",
    "device_timeout": "devices.timeout",
    "start_timeout": "limits.start",
    "stopped_after": "limits.stopped",
    "stop": "limits.stop",
    "queue_depth": "limits.queue_depth",
    "preload": "launch.preload",
    "env": "launch.env",
    "rank_env": "launch.rank_env",
    "rank_kwargs": "launch.rank_kwargs",
    "transport": "launch.transport",
}


_names = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec:
    """The options of an executor, checked and complete; the fields are `Executor`'s.

    Attributes:
        is_plain: No layout was given, so that places in it are not shown.
        factory: The pickled worker class and its arguments.
        keywords: The pickled keyword arguments of each rank; one for all if they are the same.
        pickled_decider: That of *policy*; empty for none.
    """

    worker: type[WorkerActor]
    name: str
    layout: Layout
    is_plain: bool
    factory: bytes
    keywords: tuple[bytes, ...]
    policy: RestartPolicy
    devices: Devices
    limits: Limits
    launch: Launch
    pickled_decider: bytes
    checkpoint: CheckpointPolicy | None
    cluster: ClusterOptions | None

    @property
    def world_size(self) -> int:
        """The initial number of ranks."""
        return self.layout.world_size

    @property
    def transport(self) -> Zmq | None:
        """The transport to ranks that share no memory with the driver; None if they do."""
        return check_transport(self.launch.transport)

    @property
    def is_remote(self) -> bool:
        """Whether its ranks share no memory with the driver."""
        return self.cluster is not None or self.transport is not None


def spec_of(
    worker: type[WorkerActor],
    world_size: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    layout: object = None,
    name: object = None,
    policy: object = None,
    strategy: Strategy | str | None = None,
    intensity: object = None,
    standby: int | None = None,
    devices: object = None,
    limits: object = None,
    hang_after: float | None = None,
    launch: object = None,
    checkpoint: object = None,
    cluster: object = None,
) -> ExecutorSpec:
    """Return the checked spec; the arguments are `Executor`'s.

    Raises:
        SpecError, NotPicklable: naming the argument and its value.
    """
    check_worker(worker)
    plan = _layout_of(world_size, layout)
    size = plan.world_size
    short = {"strategy": strategy, "intensity": intensity, "standby": standby}
    given = {key: value for key, value in short.items() if value is not None}
    restarts = group_of("policy", RestartPolicy, policy, given, written={key: key for key in given})
    limit, hang = ({}, {}) if hang_after is None else ({"hang": hang_after}, {"hang": "hang_after"})
    start = group_of("launch", Launch, launch, short="method")
    if start.method == "inline" and size != 1:
        raise SpecError("world_size", size, 'launch="inline" has one rank')
    of_processes = {
        "launch.env": start.env,
        "launch.rank_env": start.rank_env,
        "standby": restarts.standby,
    }
    if start.method == "inline" and (wrong := next(filter(of_processes.get, of_processes), "")):
        raise SpecError(wrong, of_processes[wrong], 'launch="inline" starts no process')
    if name is not None and (not isinstance(name, str) or not name or "\0" in name):
        raise SpecError("name", name, "give a text that is not empty")
    for field_name in ("rank_env", "rank_kwargs"):
        if each := getattr(start, field_name):
            check_per_rank(f"launch.{field_name}", each, size)
    if restarts.survivors == "keep" and worker.on_reform is WorkerActor.on_reform:
        raise SpecError("policy.survivors", "keep", f"needs {worker.__name__}.on_reform")
    if restarts.standby and start.rank_kwargs and worker.on_standby is not WorkerActor.on_standby:
        text = "a spare builds its object for on_standby before it has a rank; read ctx.rank"
        raise SpecError("launch.rank_kwargs", start.rank_kwargs, text)
    early = {name for own in start.rank_env for name in read_at_start(own)}
    if restarts.standby and early:
        text = f"{min(early)} is read as a program starts, when a spare has no rank: give it in env"
        raise SpecError("launch.rank_env", start.rank_env, text)
    saving = None if checkpoint is None else group_of("checkpoint", CheckpointPolicy, checkpoint)
    if saving is not None:
        _check_checkpoint(saving, worker, start)
    pool = group_of("devices", Devices, devices, short="names")
    if cluster is None:
        pool.check(size)
    else:
        _check_cluster(cluster, restarts, pool, start)
    if restarts.report_dir is None:
        ReportFolder.from_environment()  # checked here, and used if the runtime has none
    decider = restarts.decider
    factory = factory_of(worker, args, kwargs)
    return ExecutorSpec(
        worker=worker,
        name=name or f"{worker.__name__.lower()}-{next(_names)}",
        layout=plan,
        is_plain=layout is None,
        factory=factory,
        keywords=tuple(
            keywords_of(worker, args, kwargs or {}, own, rank)
            for rank, own in enumerate(start.rank_kwargs or [{}])
        ),
        policy=restarts,
        devices=pool,
        limits=group_of("limits", Limits, limits, limit, written=hang),
        launch=start,
        pickled_decider=b""
        if decider is None
        else encode_by_value(decider, f"decider={decider!r}"),
        checkpoint=saving
        if saving is None or saving.where is None
        else replace(saving, where=check_folder("checkpoint.where", saving.where)),
        cluster=cast("ClusterOptions | None", cluster),
    )


def _check_cluster(
    cluster: object, policy: RestartPolicy, devices: Devices, launch: Launch
) -> None:
    """Raise a `SpecError` for options that ranks on a cluster do not support yet."""
    check_kind("cluster", cluster, ClusterOptions)
    if launch.method == "inline":
        raise SpecError("launch.method", launch.method, "an inline rank is in the driver")
    if launch.transport != "local":
        remedy = "leave it out: cluster= sets the address of the driver"
        raise SpecError("launch.transport", launch.transport, remedy)
    if launch.stdio == "inherit":
        raise SpecError("launch.stdio", launch.stdio, "ranks on a cluster have no terminal")
    if policy.standby:
        raise SpecError("policy.standby", policy.standby, "give cluster.spare_nodes")
    if devices.names not in (None, "cpu", "cuda"):
        remedy = "give 'cpu' or 'cuda': each node leases its own devices"
        raise SpecError("devices.names", devices.names, remedy)
    if devices.visibility != "one":
        raise SpecError("devices.visibility", devices.visibility, "a rank on a node sees its own")


def _check_checkpoint(policy: CheckpointPolicy, worker: type[WorkerActor], launch: Launch) -> None:
    for hook in ("checkpoint", "restore"):
        if getattr(worker, hook) is getattr(WorkerActor, hook):
            raise SpecError("checkpoint", policy, f"needs {worker.__name__}.{hook}")
    if launch.method == "inline":
        raise SpecError("checkpoint", policy, "an inline rank has no process to outlive")


def _layout_of(world_size: int | None, layout: object) -> Layout:
    if world_size is not None:
        check_count("world_size", world_size)
    if layout is None:
        return Layout(tensor=1 if world_size is None else world_size)
    plan = group_of("layout", Layout, layout)
    if world_size is not None:
        plan.check(world_size)
    return plan


def layout_for(
    spec: ExecutorSpec, world_size: int, layout: Layout | None, *, now: Layout
) -> Layout:
    """Return how *world_size* ranks are laid out in place of *now*, in the executor of *spec*.

    Raises:
        SpecError: it cannot have so many, or not without a *layout*.
    """
    if layout is None and not spec.is_plain:
        raise SpecError("layout", None, "say how the new ranks are laid out")
    layout = _layout_of(world_size, layout)
    if spec.launch.method == "inline" and world_size != 1:
        raise SpecError("world_size", world_size, 'launch="inline" has one rank')
    for name in ("rank_env", "rank_kwargs"):
        if (each := getattr(spec.launch, name)) and world_size > len(each):
            remedy = f"launch.{name} has entries for {len(each)} ranks"
            raise SpecError("world_size", world_size, remedy)
    if spec.cluster is None:
        spec.devices.check(world_size)
    together = spec.checkpoint is not None and spec.policy.strategy is not Strategy.ONE_FOR_ONE
    reshards = spec.worker.reshard is not WorkerActor.reshard
    if together and not reshards and world_size != now.world_size:
        raise SpecError(
            "world_size",
            world_size,
            f"the snapshots hold the state of {now.world_size} ranks; "
            f"give {spec.worker.__name__} a method reshard(states)",
        )
    return layout
