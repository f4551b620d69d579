"""`Executor`: the user's handle of a rank group; builds, calls, observes and closes it.

Guarantees: those of `docs/semantics.md`. A garbage-collected executor ends like a closed one.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self

from phalanx.actors.group.actor import PlannedChange
from phalanx.actors.group.handle import Group
from phalanx.actors.signals.driver_exit import open_executors
from phalanx.actors.signals.interrupts import interrupts, uninterrupted
from phalanx.actors.spec.factory import check_not_loading
from phalanx.actors.spec.options import REPLACED, layout_for, replaced_keywords, spec_of
from phalanx.runtime import called_from_inside, is_holding, occupied
from phalanx.supervision import SpecError, check_callable

from .aio import AsyncExecutor
from .calls import CallMethods, W

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.actors.group.handle import Parent
    from phalanx.actors.spec.checkpoint_policy import Checkpoint, CheckpointPolicy
    from phalanx.actors.spec.layout import Layout
    from phalanx.actors.spec.options import (
        ExecutorSpec,
        Launch,
        LaunchMethod,
        Limits,
        RestartPolicy,
    )
    from phalanx.actors.spec.results import Status
    from phalanx.cluster import ClusterOptions
    from phalanx.runtime import RankInfo, Runtime
    from phalanx.supervision import ExitReason, Intensity, Strategy

    Table = Mapping[str, Any]


class Executor(CallMethods[W]):
    """A group of worker processes that serve calls together, and are replaced when they die.

    Args:
        worker: The worker class; defined anywhere, ``__main__`` and notebooks included.
        world_size: The number of ranks; None takes the layout's, or 1.
        args: Positional arguments of the worker's constructor.
        kwargs: Keyword arguments of it.
        layout: The parallel dimensions; their product must be *world_size*.
        name: Shown everywhere; no other executor of this process may have it. None generates one.
        replace: End the executor of this process that has this *name*, if there is one; for the
            cell of a notebook, which is run again.
        policy: The reaction to a death: a `RestartPolicy`.
        strategy: Short for ``policy.strategy``, which it overrides, like the next two.
        intensity: Short for ``policy.intensity``.
        standby: Short for ``policy.standby``.
        devices: The `Devices` of the ranks, or just their names.
        limits: Time limits and queue depth: `Limits`.
        hang_after: Short for ``limits.hang``.
        launch: How processes are started: a `Launch`, or just its method.
        checkpoint: When the state of the ranks is taken (`WorkerActor.checkpoint`) to be given to
            later incarnations (`WorkerActor.restore`); None takes none.
        cluster: The machines on which the ranks run, such as `Ray`; None for this one.
        runtime: The shared parts to use; None takes this process's own.

    Each of *policy*, *devices*, *limits*, *launch*, *layout* and *checkpoint* may be a mapping of
    its fields.

    Raises:
        SpecError, BadArguments, NotPicklable: an argument is invalid; nothing was started.
        StartFailed: the group did not come up; nothing is left. Its ``__cause__`` is the exception
            that a worker raised in its start, with the remote traceback in its notes; a `NoDevice`,
            if there was none; None if a rank exited, hung or was killed: see its `reports`.
    """

    @replaced_keywords({**REPLACED, "restart": "policy.restart"})
    def __init__(
        self,
        worker: type[W],
        world_size: int | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        layout: Layout | Table | None = None,
        name: str | None = None,
        replace: bool = False,
        policy: RestartPolicy | Table | None = None,
        strategy: Strategy | str | None = None,
        intensity: Intensity | tuple[int, float] | None = None,
        standby: int | None = None,
        devices: Any = None,
        limits: Limits | Table | None = None,
        hang_after: float | None = None,
        launch: Launch | LaunchMethod | Table | None = None,
        checkpoint: CheckpointPolicy | Table | None = None,
        cluster: ClusterOptions | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        spec = spec_of(
            worker,
            world_size,
            args=args,
            kwargs=kwargs,
            layout=layout,
            name=name,
            policy=policy,
            strategy=strategy,
            intensity=intensity,
            standby=standby,
            devices=devices,
            limits=limits,
            hang_after=hang_after,
            launch=launch,
            checkpoint=checkpoint,
            cluster=cluster,
        )
        if replace and name is None:
            raise SpecError("replace", replace, "name the executor that is to be replaced")
        self._start(spec, runtime, named=name, replace=replace)

    @classmethod
    def in_tree(cls, spec: ExecutorSpec, runtime: Runtime | None, parent: Parent) -> Executor[Any]:
        """Return an executor of *spec*, as a child of a supervision tree."""
        executor: Executor[Any] = cls.__new__(cls)
        executor._start(spec, runtime, parent=parent)
        return executor

    def _start(self, spec: ExecutorSpec, runtime: Runtime | None, **how: Any) -> None:
        """Build the group, *how* `Group` says, and return once it serves."""
        check_not_loading(spec.worker)
        self._spec = spec
        if spec.launch.method == "inline":
            from phalanx.testing.inline import InlineGroup  # noqa: PLC0415  # rarely used

            inline = InlineGroup(spec)
            super().__init__(inline)
            self._finalizer = weakref.finalize(self, inline.close)
            return
        if occupied.is_mine() or is_holding():
            raise called_from_inside("building an executor")
        open_executors.stay_until_the_end(builds=True)
        interrupts.install()
        try:
            group = self._build(runtime, **how)
            group.start()
            group.wait_ready()
        except BaseException:
            if hasattr(self, "_group"):
                self.close()
            raise

    @uninterrupted
    def _build(self, runtime: Runtime | None, **how: Any) -> Group:
        with occupied:
            group = Group(self._spec, runtime, **how)
            super().__init__(group)
            self._finalizer = weakref.finalize(self, group.request_close)
            self._finalizer.atexit = False  # `driver_exit` ends it at the end of the program
            return group

    @property
    def aio(self) -> AsyncExecutor:
        """The same calls for asyncio."""
        return AsyncExecutor(self, self._at_once())

    # --- looking ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name."""
        return self._spec.name

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.layout.world_size

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Every rank: its process, incarnation, epoch, state, device and what it is running."""
        return self._group.ranks()

    @property
    def has_room(self) -> bool:
        """Whether a call with ``non_block=True`` would be accepted without blocking."""
        return self._group.has_room()

    @property
    def is_failed(self) -> bool:
        """Whether the group has ended for good other than by `close`."""
        return self._group.is_failed

    @property
    def exit_reason(self) -> ExitReason | None:
        """Why the group has ended; None while it has not."""
        return self._group.exit_reason

    def status(self) -> Status:
        """Return how the executor is doing."""
        return self._group.status()

    def check_health(self, timeout: float = 10.0) -> None:
        """Return once every rank's main loop has answered.

        Raises:
            Unhealthy: a rank did not within *timeout* seconds; it names the ranks and their
                state: busy, waiting, wedged, hung, stopped, starting or dead. A heartbeat,
                answered beside the main loop, distinguishes waiting from wedged ranks; up to a
                second is added to a shorter *timeout* for it.
            WorkerDied: the group gave up, after too many deaths, while this waited for it.
            ExecutorClosed: the group has ended.
        """
        self._group.check_health(timeout)

    def register_failure_callback(self, callback: Callable[[ExitReason], None]) -> None:
        """Run ``callback(reason)`` once, when the group ends for good other than by `close`.

        After the fact it runs at once. Not for the first start: the constructor raises there.
        """
        check_callable("callback", callback)
        self._group.when_failed(callback)

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Have *callback* called with every event of the group, and with what workers emit.

        Returns what unsubscribes. Callbacks run one after the other on a thread of their own, where
        a blocking call raises.
        """
        check_callable("callback", callback)
        return self._group.subscribe(callback)

    def events(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """`subscribe`, under its former name."""
        text = "phalanx: Executor.events() is deprecated: write subscribe()"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self.subscribe(callback)

    # --- changing -----------------------------------------------------------------------

    def checkpoint(self, timeout: float | None = None) -> Checkpoint:
        """Take the state of every rank now, in its turn among the calls; return what is kept of it.

        Deaths meanwhile have it tried again.

        Args:
            timeout: Seconds, waiting for a restart included; None waits without limit.

        Raises:
            SpecError: the executor was built without a `CheckpointPolicy`.
            CallTimeout, WorkerDied, ExecutorClosed: as for any call.
            Exception: what a rank's `WorkerActor.checkpoint` raised, or why it cannot be stored.
        """
        if self._spec.checkpoint is None:
            raise SpecError("checkpoint", None, "build the executor with a CheckpointPolicy")
        return self._group.save(timeout)

    def restart(
        self, rank: int | None = None, *, timeout: float | None = None, force: bool = False
    ) -> None:
        """Restart *rank* and those its strategy ties to it, or every rank; nothing failed.

        With ``survivors="keep"`` *rank* alone: the others are re-formed with it, as after a death.

        Waits for the calls in flight; new ones wait until the group is whole again. With a
        `CheckpointPolicy` the state of the ranks is taken first, so that none of it is lost.

        Args:
            rank: Which; None for every one.
            timeout: Seconds; None waits without limit.
            force: Do not wait for the calls in flight, abandoned ones included, and take no state:
                end what the ranks run, by SIGTERM and after ``stop.hurry`` seconds SIGKILL. Calls
                they had begun end in `WorkerDied`, or are sent again, as after a death. It counts
                as no failure all the same.

        Raises:
            TimeoutError: *timeout* seconds passed before the calls in flight had ended, and nothing
                was changed; or before the group was whole again, which goes on by itself. The
                message says which.
        """

        def plan() -> PlannedChange:  # anew at each attempt: another thread may resize the group
            layout = self.layout
            if rank is not None:
                layout.check_rank("rank", rank)
            ranks = frozenset(range(layout.world_size) if rank is None else (rank,))
            return PlannedChange(ranks=ranks, force=force)

        plan()
        self._group.change(plan, timeout, force=force)

    def resize(
        self, world_size: int, *, layout: Layout | None = None, timeout: float | None = None
    ) -> None:
        """Form the group anew with *world_size* ranks, after the calls in flight.

        On a cluster it first waits for the machines that are missing, while calls go on. One that
        is lost after the first rank has been ended is replaced as after any loss.

        Args:
            world_size: How many.
            layout: How they are laid out; needed where the executor was built with a layout.
            timeout: As in `restart`.

        Raises:
            NoNode: there is no machine for a rank, after ``cluster.node_wait`` seconds; nothing was
                changed.
            TimeoutError: as from `restart`.
        """
        plan = layout_for(self._spec, world_size, layout, now=self.layout)
        self._group.resize(world_size, plan, timeout)

    def forgive_restarts(self, count: int) -> None:
        """Have the last *count* restarts not count against the intensity.

        For a cause that is known and gone, such as an input that killed its rank and is not sent
        again. Returns at once; calls of this and deaths take effect in their order.
        """
        self._group.forgive_restarts(count)

    def drain(self, timeout: float | None = None) -> None:
        """Return once every call made so far has ended; those made meanwhile may wait until then.

        Those that wait for their turn or for a restart are waited for as well.

        Raises:
            TimeoutError: *timeout* seconds passed first.
        """
        self._group.drain(timeout)

    # --- ending -------------------------------------------------------------------------

    def close(self) -> None:
        """Stop every rank and give everything back; calls after it raise `ExecutorClosed`.

        Calls in flight may end while ranks get stop requests. Idempotent, from any thread.
        """
        self._group.close()

    def wait_closed(self, timeout: float | None = None) -> ExitReason | None:
        """Wait until the group has ended, for whatever cause, and everything has been given back.

        Returns why it ended; None if it has not within *timeout* seconds. None waits without limit.
        """
        return self._group.wait_closed(timeout)

    def request_close(self) -> None:
        """Ask for the end and return at once."""
        self._group.request_close()

    def kill(self) -> None:
        """Kill every rank now and end the executor; returns at once. `close` is the good order."""
        self._group.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        view = self._group.view  # no more: that takes no lock
        worker = self._spec.worker.__name__
        return f"<Executor {self.name!r}: {view.world_size} x {worker}, {view.state}>"
