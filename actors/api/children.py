"""An executor, with its rank group, as an ordinary child of a supervisor.

Guarantees: the group is one child in OTP's sense: started when all its ranks are ready, ended when
all of them have ended; past its own intensity it ends with reason ``shutdown``, as a supervisor
that gives up, and the supervisor above decides by the child's restart type. Each start is a new
executor: find the current one with `Supervisor.child`. It gets the snapshots that a
`CheckpointPolicy` kept of the last one, for as long as the child spec lives.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors.checkpoint.coordinator import coordinator_of
from phalanx.actors.group.handle import Parent
from phalanx.actors.spec.checkpoint_policy import CheckpointPolicy
from phalanx.actors.spec.options import (
    REPLACED,
    RestartPolicy,
    group_of,
    replaced_keywords,
    spec_of,
)
from phalanx.cluster import ClusterOptions, JoinedNodes, Ray
from phalanx.runtime import Zmq
from phalanx.supervision import (
    BadArguments,
    ChildSpec,
    ChildType,
    Restart,
    RuntimeFault,
    SpecError,
)
from phalanx.supervision import tree_from_toml as supervision_from_toml

from .executor import Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.actors.checkpoint.coordinator import CheckpointCoordinator
    from phalanx.actors.spec.worker import WorkerActor
    from phalanx.runtime import Runtime
    from phalanx.supervision import ExitReason, StartContext, SupervisorSpec


_END = 60.0  # seconds for the end of a start that was given up; it takes one or two


class ExecutorHandle:
    """One running executor, as its supervisor holds it.

    Attributes:
        ref: The executor.
    """

    def __init__(self, executor: Executor[Any]) -> None:
        self.ref = executor

    def terminate(self, reason: ExitReason) -> None:  # noqa: ARG002  # a group stops in one way
        """Ask it to end."""
        self.ref.request_close()

    def kill(self) -> None:
        """Kill every rank now."""
        self.ref.kill()


@replaced_keywords({**REPLACED, "ranks_restart": "policy.restart"})
def executor_child(
    id: str,  # noqa: A002  # OTP's word for it
    worker: type[WorkerActor],
    world_size: int | None = None,
    *,
    restart: Restart = Restart.PERMANENT,
    shutdown: float | None = None,
    significant: bool = False,
    start_within: float | None = None,
    runtime: Runtime | None = None,
    **options: Any,
) -> ChildSpec:
    """Return the spec of an executor as a child.

    Args:
        id: Its id among its siblings; its name becomes its path in the tree.
        restart: Which of its ends the supervisor above restarts. Which ends of a rank the executor
            restarts is ``policy.restart``.
        shutdown: Seconds the group has to stop before every rank is killed; None for no limit, as
            for a supervisor: its own stop policy has limits.
        options: The other options of `Executor`, except *name* and *replace*.

    *worker*, *world_size* and *runtime* are as for `Executor`, the rest as in `ChildSpec`.
    """
    for option in ("name", "replace"):
        if option in options:
            raise SpecError(option, options[option], "an executor in a tree is named by its path")
    try:
        inspect.signature(spec_of).bind(worker, world_size, **options)
    except TypeError as error:
        raise TypeError(f"executor_child() {error}") from None
    spec = spec_of(worker, world_size, **options)
    if spec.launch.method == "inline":
        raise SpecError("launch", "inline", "an inline rank has no process to supervise")
    # By path: the states of the ranks outlive the executor, as long as there is this child spec.
    # Those that no executor uses, for two trees may have one path, and the starts of the others.
    kept: dict[str, tuple[list[CheckpointCoordinator | None], list[StartContext]]] = {}
    changed = threading.Condition()

    def start(ctx: StartContext) -> ExecutorHandle:
        with changed:
            _forget_gone(kept, ctx)
            unused, users = kept.setdefault(ctx.path, ([], []))

            def has_ended() -> bool:  # the start before, if that was given up: it has the states
                return bool(unused) or not any(each.is_abandoned for each in users)

            if not changed.wait_for(has_ended, _END):
                raise RuntimeFault(f"the start of {ctx.path} that was given up has not ended")
            checkpoints = unused.pop() if unused else coordinator_of(spec)
            users.append(ctx)

        def give_back() -> None:
            with changed:
                if ctx in users:
                    users.remove(ctx)
                    unused.append(checkpoints)
                    changed.notify_all()

        def ended(reason: ExitReason) -> None:
            give_back()
            ctx.exited(reason)

        parent = Parent(ctx=ctx, on_end=ended, checkpoints=checkpoints)
        try:
            executor = Executor.in_tree(replace(spec, name=ctx.path), runtime, parent)
        except BaseException:
            give_back()  # it may have ended before there was anything to end
            raise
        return ExecutorHandle(executor)

    return ChildSpec(
        id,
        start,
        restart=restart,
        shutdown=shutdown,
        type=ChildType.SUPERVISOR,
        significant=significant,
        killable=True,
        start_within=start_within,
    )


@replaced_keywords(REPLACED)
def worker_child(
    id: str,  # noqa: A002  # OTP's word for it
    worker: type[WorkerActor],
    **options: Any,
) -> ChildSpec:
    """Return the spec of a single worker process as a child: a group of one that never restarts.

    Its supervisor alone decides: the process is its child, and its ends are the child's ends.
    With a `CheckpointPolicy` the next process is given back the state of the last.
    """
    policy = options.pop("policy", None)
    policy = group_of("policy", RestartPolicy, policy, {"restart": Restart.TEMPORARY})
    options = {"shutdown": 10.0, **options}
    return executor_child(id, worker, 1, policy=policy, **options)


def tree_from_toml(text: str, starts: Mapping[str, Any] | None = None) -> SupervisorSpec:
    """Return the tree that *text* declares, executors included.

    ``[executor.NAME]`` declares one: ``worker = "module:Class"``, the options of `executor_child`,
    and a table for each group of options, such as ``policy``, ``limits`` and ``checkpoint``. That
    of ``cluster`` says ``engine = "ray"`` or ``"join"``, and the options of `Ray` or `JoinedNodes`.

    Args:
        text: The TOML document; see `phalanx.supervision.tree_from_toml` for the rest of it.
        starts: Start functions, worker classes, device pools (``devices = "gpus"``), deciders and
            clusters by the name the document uses for them; any other name is
            ``module:attribute`` and imported.

    Raises:
        SpecError: The document is invalid; nothing has been started.
    """
    return supervision_from_toml(text, starts, {"executor": _declared})


_ENGINES: dict[str, type[ClusterOptions]] = {"ray": Ray, "join": JoinedNodes}
_OPTIONS = {
    *inspect.signature(spec_of).parameters,
    *inspect.signature(executor_child).parameters,
} - {"id", "name", "runtime", "options"}


def _declared(id: str, table: dict[str, Any], load: Callable[[str, object], Any]) -> ChildSpec:  # noqa: A002  # as above
    for option in table.keys() - _OPTIONS:
        known = ", ".join(sorted(_OPTIONS))
        raise SpecError(option, table[option], f"unknown; known are {known}")
    worker = load("worker", table.pop("worker", None))
    devices = _table(table.get("devices"), "names")
    if isinstance(name := devices.get("names"), str) and name not in {"auto", "cpu", "cuda"}:
        table["devices"] = {**devices, "names": load("devices", name)}
    policy = _table(table.get("policy"))
    if isinstance(name := policy.get("decider"), str):
        table["policy"] = {**policy, "decider": load("policy.decider", name)}
    launch = _table(table.get("launch"))
    transport: Any = launch.get("transport")
    if isinstance(transport, dict):
        zmq = group_of("launch.transport", Zmq, cast("dict[str, Any]", transport))
        table["launch"] = {**launch, "transport": zmq}
    if "cluster" in table:
        table["cluster"] = _cluster(table["cluster"], load)
    if "checkpoint" in table:
        table["checkpoint"] = group_of("checkpoint", CheckpointPolicy, table["checkpoint"])
    try:
        return executor_child(id, worker, **table)
    except BadArguments as error:  # of the constructor
        raise SpecError("args", table.get("args", ()), str(error)) from None


def _table(given: object, short: str = "") -> dict[str, Any]:
    """Return the group of options *given*; what is no table is the option *short*."""
    return cast("dict[str, Any]", given) if isinstance(given, dict) else {short: given}


def _cluster(given: object, load: Callable[[str, object], Any]) -> object:
    if not isinstance(given, dict):
        return load("cluster", given)
    table = dict(cast("dict[str, Any]", given))
    engine: object = table.pop("engine", None)
    if not isinstance(engine, str) or engine not in _ENGINES:
        raise SpecError("cluster.engine", engine, f"give {' or '.join(_ENGINES)}")
    return group_of("cluster", _ENGINES[engine], table)


def _forget_gone(kept: dict[str, Any], ctx: StartContext) -> None:
    """Drop what was kept of siblings of *ctx* that their supervisor has no more: of instances."""
    parent = ctx.path.rpartition("/")[0]
    siblings = {path for path in kept if path.rpartition("/")[0] == parent} - {ctx.path}
    if not siblings:
        return
    pending = [ctx.snapshot()]
    while pending:
        supervisor = pending.pop()
        siblings -= {child.path for child in supervisor.children}
        pending += [child.supervisor for child in supervisor.children if child.supervisor]
    for path in siblings:
        del kept[path]
