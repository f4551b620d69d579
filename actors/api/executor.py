"""`Executor`: what users hold. Builds a rank group, calls it, looks at it, ends it.

Guarantees: those of `docs/semantics.md`. A forgotten executor ends, as one that is closed does.

Left to others: its calls (`Dispatch`), the rest of what it does with its ranks (`RankGroup`, or
`InlineGroup` where there is no process), when ranks come and go (`executor_actor`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

from phalanx.actors.group.handle import Core
from phalanx.actors.group.messages import Planned
from phalanx.actors.signals.interrupts import interrupts, uninterrupted
from phalanx.actors.spec.options import StopPolicy, layout_for, spec_of
from phalanx.actors.spec.validate import check_callable, check_rank
from phalanx.actors.spec.worker import Methods
from phalanx.runtime import called_from_inside, is_holding, occupied
from phalanx.supervision import Intensity, Restart, SpecError, Strategy

from .aio import AsyncExecutor
from .calls import Dispatch, W
from .group import RankGroup
from .inline import InlineGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from phalanx.actors.group.handle import Place
    from phalanx.actors.spec.checkpoint_policy import Checkpoint, CheckpointPolicy
    from phalanx.actors.spec.layout import Layout
    from phalanx.actors.spec.options import Launch, Survivors
    from phalanx.actors.spec.results import RankInfo, Status
    from phalanx.actors.spec.worker import Method
    from phalanx.runtime import ReportFolder, Runtime, Transport, Visibility
    from phalanx.supervision import BackOff, Decider, ExitReason


class Executor(Dispatch[W]):
    """A group of worker processes that serve calls together, and heal.

    Args:
        worker: The worker class; defined anywhere, ``__main__`` and notebooks included.
        world_size: How many ranks; None takes the layout's, or 1.
        args: Positional arguments of the worker's constructor.
        kwargs: Keyword arguments of it.
        rank_kwargs: Further ones for each rank: a list with one mapping per rank.
        tensor: Ranks that share one layer.
        pipeline: Stages. The sizes' product must be *world_size*.
        prefill_context: Ranks that share one prompt.
        layout: The sizes as a `Layout`, in place of the three.
        strategy: Who is restarted with a rank that died. `ONE_FOR_ALL` for ranks that share a
            process group; `ONE_FOR_ONE` for independent replicas. Its word does as well.
        intensity: How many restarts are allowed, in how many seconds; one more ends the group.
        restart: Which ends of a rank are restarted. A rank that is not ends the group.
        backoff: How long to wait before restarts in a row; None does not wait.
        devices: A `DevicePool` that several executors share; or the devices to choose from, by
            index or UUID, where one may stand twice; or ``"cpu"``, ``"cuda"``; or None for the GPUs
            that are visible, else CPU slots. Executors of one runtime that ask for the same devices
            share them.
        devices_per_rank: How many devices each rank gets; or which part of one, such as 0.25, and
            then that many ranks share it.
        visibility: ``"one"``: a rank sees what is leased to it, and nothing else. ``"all"``: it
            sees all devices to choose from, each under the same name in every rank; its own are
            `WorkerContext.devices`.
        device_timeout: Seconds that a restart waits while there is no device for it: every one is
            leased to others, or in quarantine. Then the group ends. None waits for ever, 0 not at
            all. The first start waits only for memory that is just being released.
        decider: What an exception of a method means for the rank that raised it, by its type, name
            or a predicate: to *resume* (what is not decided), to *restart* the process, to *stop*
            the group or to *escalate*; and what its exits mean, in place of *restart*. The caller
            gets the exception first. A rule's *child* is the rank, as text. None restarts a rank
            after CUDA errors that leave its process unusable, and resumes after all others, running
            out of memory included.
        preload: Modules that the zygote imports once for all workers. What is missing each rank
            imports again at each start: a first ``torch.optim`` optimizer imports ``torch._dynamo``
            (over a second), so give ``("torch", "torch._dynamo")`` and your own modules to train.
        launch: ``"zygote"`` forks workers from a warm process, ``"exec"`` starts a fresh
            interpreter for each, ``"inline"`` runs one rank in the caller's own thread.
        env: Environment variables of every worker, over the driver's at the moment of the start.
            Where neither sets ``OMP_NUM_THREADS`` each rank gets its share of the processors that
            the driver may use.
        rank_env: Further ones for each rank.
        name: Shown everywhere; no other executor of this process may have it. None makes one up.
        replace: End the executor of this process that has this *name*, if there is one; for the
            cell of a notebook, which is run again.
        start_timeout: Seconds from a rank's start to READY.
        stop: How ranks are stopped.
        queue_depth: Calls that one rank may have been sent and not answered.
        async_output: Whether the worker's step methods return `AsyncOutput` handles.
        report_dir: Where crash reports are also written as files: a folder, or a `ReportFolder`,
            which also says how many are kept. None takes the runtime's, then that which the
            variable ``PHALANX_REPORT_DIR`` names, and else writes none.
        hang_after: Seconds a call may run on a rank before that rank is taken for hung: its stacks
            are taken, and it is killed. None sets no limit but those that methods declare
            (`limits`).
        stopped_after: Seconds a rank that owes an answer, starts, or joins another epoch may be
            stopped (SIGSTOP); None for ever.
        standby: How many spare processes are kept warm: everything is imported and `on_standby`
            has run. One takes the place of a rank that died at once; another follows it.
        survivors: What becomes of the other ranks of a process group, under `ONE_FOR_ALL`, when one
            has died: ``"restart"`` starts all of them anew; ``"keep"`` replaces the dead one only,
            and has the others leave the old process group and run `on_reform`. Made for gloo.
        leave_within: Seconds a rank that is kept has to end its call and leave the old process
            group; then it is replaced as well.
        transport: How messages reach the ranks: ``"local"`` by sockets and memory that this
            machine's processes share, ``"zmq"`` or a `Zmq` by ZeroMQ with keys made per group, as
            for ranks that share neither.
        checkpoint: When the state of the ranks is taken (`WorkerActor.checkpoint`) to be given to
            those that come after them (`WorkerActor.restore`); None takes none.
        spin: Seconds for which who waits for a message looks for it before it sleeps in the kernel:
            a caller for its answer, a rank for its next call. To be woken costs more than a small
            message, and a processor. 0 sleeps at once. None looks for 50 microseconds, if this
            process may use a processor for each rank and one for itself, and sleeps at once
            otherwise. Where there are more ranks than processors they sleep whatever is said, and
            the caller looks alone. At most 1; with *transport* ``"zmq"`` 0 or None, which then
            sleeps.
        runtime: The shared parts to use; None takes this process's own.

    Raises:
        SpecError, NotPicklable: an argument makes no sense; nothing was started.
        NoDevice: others hold the devices, or those are in quarantine.
        StartFailed: a rank exited, hung or was killed in its start; nothing is left. Where it
            raised, that very exception is raised here, with the remote traceback in its notes.
    """

    def __init__(
        self,
        worker: type[W],
        world_size: int | None = None,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        rank_kwargs: Sequence[Mapping[str, Any]] | None = None,
        tensor: int | None = None,
        pipeline: int | None = None,
        prefill_context: int | None = None,
        layout: Layout | None = None,
        strategy: Strategy | str = Strategy.ONE_FOR_ALL,
        intensity: Intensity | tuple[int, float] = Intensity(3, 60.0),  # noqa: B008  # frozen
        restart: Restart | str = Restart.PERMANENT,
        backoff: BackOff | None = None,
        devices: Any = None,
        devices_per_rank: float = 1,
        visibility: Visibility = "one",
        device_timeout: float | None = 30.0,
        decider: Decider | None = None,
        preload: Sequence[str] = ("torch",),
        launch: Launch = "zygote",
        env: Mapping[str, str] | None = None,
        rank_env: Sequence[Mapping[str, str]] | None = None,
        name: str | None = None,
        replace: bool = False,
        start_timeout: float = 300.0,
        stop: StopPolicy = StopPolicy(),  # noqa: B008  # frozen
        queue_depth: int = 64,
        async_output: bool = False,
        report_dir: str | Path | ReportFolder | None = None,
        hang_after: float | None = None,
        stopped_after: float | None = 10.0,
        standby: int = 0,
        survivors: Survivors = "restart",
        leave_within: float = 10.0,
        transport: Transport = "local",
        checkpoint: CheckpointPolicy | None = None,
        spin: float | None = None,
        runtime: Runtime | None = None,
        _place: Place | None = None,
    ) -> None:
        # fmt: off  # one line for each topic: a column of forty names hides what is left out
        spec = spec_of(
            worker,
            world_size,
            args=args,
            kwargs=kwargs,
            rank_kwargs=rank_kwargs,
            tensor=tensor,
            pipeline=pipeline,
            prefill_context=prefill_context,
            layout=layout,
            strategy=strategy,
            intensity=intensity,
            restart=restart,
            backoff=backoff,
            devices=devices,
            devices_per_rank=devices_per_rank,
            visibility=visibility,
            device_timeout=device_timeout,
            decider=decider,
            preload=preload,
            launch=launch,
            env=env,
            rank_env=rank_env,
            name=name,
            start_timeout=start_timeout,
            stop=stop,
            queue_depth=queue_depth,
            async_output=async_output,
            report_dir=report_dir,
            hang_after=hang_after,
            stopped_after=stopped_after,
            standby=standby,
            survivors=survivors,
            leave_within=leave_within,
            transport=transport,
            checkpoint=checkpoint,
            spin=spin,
        )
        # fmt: on
        if replace and name is None:
            raise SpecError("replace", replace, "name the executor that is to be replaced")
        methods = Methods(worker)
        steps = methods.steps()
        for each in steps:
            if hasattr(type(self), each):
                raise SpecError("worker", worker, f"{each!r} is a method of every executor: rename")
        self._spec = spec
        if launch == "inline":
            super().__init__(InlineGroup(spec, methods), steps)
            return
        if occupied.is_mine() or is_holding():
            raise called_from_inside("building an executor")
        interrupts.install()
        named = name if _place is None else None  # a tree may stand beside one of the same id
        try:
            self._build(methods, steps, runtime, named, _place, replace=replace)
            self._core.start()
            self._core.wait_ready()
        except BaseException:
            if hasattr(self, "_core"):
                self.close()
            raise

    @uninterrupted
    def _build(
        self,
        methods: Methods,
        steps: Mapping[str, Method],
        runtime: Runtime | None,
        named: str | None,
        place: Place | None,
        *,
        replace: bool,
    ) -> None:
        with occupied:
            core = Core(self._spec, runtime, named, place, replace=replace)
            super().__init__(RankGroup(core, methods), steps)
            self._finalizer = weakref.finalize(self, core.request_end)
            self._finalizer.atexit = False  # the end of the program has its own way (termination)
            self._core = core

    @property
    def aio(self) -> AsyncExecutor:
        """The same calls for asyncio."""
        return AsyncExecutor(self, Dispatch(self._group, self._steps, at_once=True))

    # --- looking ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What it is called."""
        return self._spec.name

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return self._layout.world_size

    @property
    def layout(self) -> Layout:
        """How they are laid out."""
        return self._layout

    @property
    def max_concurrent_batches(self) -> int:
        """How many calls keep the group busy: its stages, or 2 with async outputs and no stages."""
        if self._layout.pipeline > 1:
            return self._layout.pipeline
        return 2 if self._spec.async_output else 1

    @property
    def ranks(self) -> tuple[RankInfo, ...]:
        """Every rank: its process, incarnation, epoch, state, device and what it is running."""
        return self._group.ranks()

    @property
    def has_room(self) -> bool:
        """Whether a call with ``non_block=True`` would be accepted without blocking."""
        return self._group.has_room

    @property
    def is_failed(self) -> bool:
        """Whether the group has ended for good other than by `close`."""
        return self._group.is_failed

    def status(self) -> Status:
        """Return how the executor is doing."""
        return self._group.status()

    def check_health(self, timeout: float = 10.0) -> None:
        """Return once every rank's main loop has answered.

        Raises:
            Unhealthy: a rank did not within *timeout* seconds; it says which, and what they are
                doing instead: busy, waiting, wedged, hung, stopped, starting or dead. Those that
                wait are told from those that are wedged by asking them beside their main loops,
                for which up to a second is added to a shorter *timeout*.
            WorkerDied: the group gave up, after too many deaths, while this waited for it.
            ExecutorClosed: there is no group any more.
        """
        self._group.check_health(timeout)

    def register_failure_callback(self, callback: Callable[[ExitReason], None]) -> None:
        """Run ``callback(reason)`` once, when the group ends for good other than by `close`.

        After the fact it runs at once. Not for the first start: the constructor raises there.
        """
        check_callable("callback", callback)
        self._group.when_failed(callback)

    def events(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Have every event of the group, and what workers emit, handed to *callback*.

        Returns what unsubscribes. Callbacks run one after the other on a thread of their own, where
        a blocking call raises.
        """
        check_callable("callback", callback)
        return self._group.listen(callback)

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

        def plan() -> Planned:  # anew at each attempt: another thread may resize the group
            size = self.world_size
            if rank is not None:
                check_rank("rank", rank, size)
            ranks = frozenset(range(size) if rank is None else (rank,))
            return Planned(ranks=ranks, force=force)

        plan()
        self._group.change(plan, timeout, force=force)

    def resize(
        self, world_size: int, *, layout: Layout | None = None, timeout: float | None = None
    ) -> None:
        """Form the group anew with *world_size* ranks, after the calls in flight.

        Args:
            world_size: How many.
            layout: How they are laid out; needed where the executor was built with a layout.
            timeout: As in `restart`.
        """
        plan = layout_for(self._spec, world_size, layout, now=self._layout)
        self._group.reserve(world_size)
        self._group.change(lambda: Planned(size=world_size, layout=plan), timeout)

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

        Calls in flight may end while ranks are being asked to stop. Idempotent, from any thread.
        """
        self._group.close()

    def request_close(self) -> None:
        """Ask for the end and return at once; for who must not wait."""
        self._group.request_close()

    def kill(self) -> None:
        """Kill every rank now and end the executor; returns at once. `close` is the good order."""
        self._group.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.status().state
        return (
            f"<Executor {self.name!r}: {self.world_size} x {self._spec.worker.__name__}, {state}>"
        )
