"""An executor, with its rank group, as an ordinary child of a supervisor.

Guarantees: the group is one child in OTP's sense: started when all its ranks are ready, ended when
all of them are gone; past its own intensity it ends with reason ``shutdown``, as a supervisor that
gives up, and the supervisor above decides by the child's restart type. Each start is a new
executor: find the current one with `Supervisor.child`. What a `CheckpointPolicy` has kept of the
last one is given to it, for as long as the child spec lives.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from phalanx.actors.checkpoint.coordinator import cuts_of
from phalanx.actors.group.handle import Place
from phalanx.actors.spec.options import spec_of
from phalanx.supervision import ChildSpec, ChildType, Restart, SpecError

from .executor import Executor

if TYPE_CHECKING:
    from phalanx.actors.checkpoint.coordinator import Cuts
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.actors.spec.worker import WorkerActor
    from phalanx.supervision import ExitReason, StartContext


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


def executor_child(
    id: str,  # noqa: A002  # OTP's word for it
    worker: type[WorkerActor],
    world_size: int | None = None,
    *,
    restart: Restart = Restart.PERMANENT,
    shutdown: float | None = None,
    significant: bool = False,
    start_within: float | None = None,
    ranks_restart: Restart = Restart.PERMANENT,
    **options: Any,
) -> ChildSpec:
    """Return the spec of an executor as a child.

    Args:
        id: Its id among its siblings; its name becomes its path in the tree.
        worker: As for `Executor`, like *world_size* and *options*.
        world_size: As above.
        restart: Which of its ends the supervisor above restarts.
        shutdown: Seconds the group has to stop before every rank is killed; None for no limit, as
            for a supervisor: its own stop policy has limits.
        significant: As in `ChildSpec`.
        start_within: As in `ChildSpec`.
        ranks_restart: The executor's own *restart*: which ends of a rank it restarts.
        options: Everything else `Executor` takes, except its name.
    """
    for option in ("name", "replace"):
        if option in options:
            raise SpecError(option, options[option], "an executor in a tree is named by its path")
    if options.get("launch") == "inline":
        raise SpecError("launch", "inline", "an inline rank has no process to supervise")
    spec = _check(worker, world_size, {**options, "restart": ranks_restart})
    # By path: the states of the ranks outlive the executor, as long as there is this child spec.
    # Those that no executor uses: two trees may have one path.
    unused: dict[str, list[Cuts | None]] = {}

    def start(ctx: StartContext) -> ExecutorHandle:
        _forget_gone(unused, ctx)
        mine = unused.setdefault(ctx.path, [])
        cuts = mine.pop() if mine else cuts_of(spec)

        def ended(reason: ExitReason) -> None:
            mine.append(cuts)
            ctx.exited(reason)

        try:
            executor: Executor[Any] = Executor(
                worker,
                world_size,
                name=ctx.path,
                restart=ranks_restart,
                _place=Place(
                    on_end=ended,
                    on_use=ctx.progressed,
                    emit_by=ctx.emit_by,
                    look=ctx.snapshot,
                    cuts=cuts,
                ),
                **options,
            )
        except BaseException:
            if cuts not in mine:  # it ended before there was anything to end
                mine.append(cuts)
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


def worker_child(
    id: str,  # noqa: A002  # OTP's word for it
    worker: type[WorkerActor],
    **options: Any,
) -> ChildSpec:
    """Return the spec of a single worker process as a child: a group of one that never restarts.

    Its supervisor alone decides: the process is its child, and its ends are the child's ends.
    With a `CheckpointPolicy` the next process is given back the state of the last.
    """
    options = {"shutdown": 10.0, "ranks_restart": Restart.TEMPORARY, **options}
    return executor_child(id, worker, 1, **options)


def _forget_gone(unused: dict[str, list[Cuts | None]], ctx: StartContext) -> None:
    """Drop what was kept of siblings of *ctx* that their supervisor has no more: of instances."""
    parent = ctx.path.rpartition("/")[0]
    siblings = {path for path in unused if path.rpartition("/")[0] == parent} - {ctx.path}
    if not siblings:
        return
    pending = [ctx.snapshot()]
    while pending:
        supervisor = pending.pop()
        siblings -= {child.path for child in supervisor.children}
        pending += [child.supervisor for child in supervisor.children if child.supervisor]
    for path in siblings:
        del unused[path]


def _check(
    worker: type[WorkerActor], world_size: int | None, options: dict[str, Any]
) -> ExecutorSpec:
    """Return the spec of the executor; raises what that would raise, now and not at each start."""
    given = inspect.signature(Executor).bind(worker, world_size, **options)
    given.apply_defaults()
    values = dict(given.arguments)
    for not_checked in ("runtime", "replace", "_place"):
        del values[not_checked]
    return spec_of(**values)
