"""`Executor`: what users hold. Builds a rank group, calls it, looks at it, ends it.

Guarantees: those of `docs/semantics.md`. A blocking call runs in its caller's thread from the
first byte to the last.

Left to others: when ranks come and go (`executor_actor`), how messages travel (`plane`).
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, overload

from phalanx.runtime import DevicePool, Payload, Vitals, encode
from phalanx.supervision import (
    CallTimeout,
    ExecutorClosed,
    Intensity,
    Phase,
    Restart,
    SpecError,
    Strategy,
    Unhealthy,
    WouldDeadlock,
)

from .aio import AsyncExecutor
from .calls import Call, Shape, terms_of
from .core import Core
from .futures import CallFuture
from .health import diagnose
from .inline import InlineRank
from .interrupts import interrupts
from .layout import Layout
from .notices import Emitted, Overdue, Planned
from .outcomes import Outcome, OutcomeKind
from .probe import current_probe
from .pulses import PATIENCE
from .saving import save_now, saving_call
from .spec import StopPolicy, check_count, check_per_rank, check_seconds, spec_of
from .status import Status
from .steps import Steps, step_function
from .streams import Incoming, InlineStream, ReplyStream
from .termination import living
from .worker import Declared, Methods, WorkerActor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from phalanx.runtime import ReportFolder, Runtime, Transport, Visibility
    from phalanx.supervision import BackOff, Decider, ExitReason, SupervisorSnapshot

    from .calls import OnDeath, OnTimeout
    from .checkpoint import Checkpoint, CheckpointPolicy
    from .cuts import Cuts
    from .probe import CallTap
    from .pulses import Sign
    from .spec import Launch, Survivors
    from .status import GroupView, RankInfo
    from .tracing import CallSpan

W = TypeVar("W", bound=WorkerActor)
_SETTLED = (Phase.SERVING, Phase.CLOSING, Phase.ENDED)


class Executor(Generic[W]):
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
            process group; `ONE_FOR_ONE` for independent replicas.
        intensity: How many restarts are allowed; one more ends the group.
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
        preload: Modules that the zygote imports once for all workers.
        launch: ``"zygote"`` forks workers from a warm process, ``"exec"`` starts a fresh
            interpreter for each, ``"inline"`` runs one rank in the caller's own thread.
        env: Environment variables of every worker, over the driver's at the moment of the start.
        rank_env: Further ones for each rank.
        name: Shown everywhere. Building another executor of the same name in this process closes
            this one, as when a notebook cell is run again. None makes one up.
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
        stopped_after: Seconds a rank that owes an answer may be stopped (SIGSTOP); None for ever.
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
        strategy: Strategy = Strategy.ONE_FOR_ALL,
        intensity: Intensity = Intensity(3, 60.0),  # noqa: B008  # frozen
        restart: Restart = Restart.PERMANENT,
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
        runtime: Runtime | None = None,
        _on_end: Callable[[ExitReason], None] | None = None,
        _look: Callable[[], SupervisorSnapshot] | None = None,
        _cuts: Cuts | None = None,
    ) -> None:
        self._spec = spec_of(
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
        )
        self._methods = Methods(worker)
        self._steps = self._methods.steps()
        for each in self._steps:
            if hasattr(type(self), each):
                raise SpecError("worker", worker, f"{each!r} is a method of every executor: rename")
        self._seq = itertools.count(1)
        self._listeners = itertools.count(1)
        self._bare: dict[str, tuple[Payload]] = {}  # calls without arguments, by method
        self._inline: InlineRank | None = None
        self._inline_closed = False
        self._inline_listeners: dict[int, Callable[[Any], None]] = {}
        self._layout = self._spec.layout
        if launch == "inline":
            self._inline = InlineRank(self._spec, self._emitted_inline)
            return
        probe = current_probe()
        if probe is not None:
            self._spec = probe.adjust(self._spec)
        self._core = Core(
            self._spec, runtime, name, on_end=_on_end, probe=probe, look=_look, cuts=_cuts
        )
        self._plane = self._core.shared.plane
        self._finalizer = weakref.finalize(self, self._core.end)
        self._finalizer.atexit = False  # the end of the program has its own way (termination)
        try:
            self._core.wait_ready()
        except BaseException:
            self.close()
            raise

    # --- calling ------------------------------------------------------------------------

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        aggregate: Callable[[list[Any], int], Any] | None = None,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
        on_timeout: Literal["leave", "restart"] = "leave",
    ) -> Any:
        """Call *method* on every rank, as a whole.

        Args:
            method: A method's name, or a callable that gets the worker as its first argument.
            timeout: Seconds for the whole call, waiting for a restart included; None waits without
                limit, for ever on a worker that loops.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            non_block: Return a `CallFuture` at once.
            unique_reply_rank: Only this rank's value travels back, and is returned alone. An
                exception of any rank fails the call all the same.
            aggregate: Given the list of all ranks' values and the rank whose output leads
                (*unique_reply_rank*, else the layout's output rank), returns the call's value.
            on_death: ``"fail"``: at most once. ``"retry"``: at least once, sent again as a whole
                up to *retries* times after the group has healed. None takes what the method
                declares (`idempotent`), else ``"fail"``.
            retries: See *on_death*.
            on_timeout: ``"restart"`` treats ranks that have not answered in time as hung.

        Returns:
            The list of all ranks' values; with *unique_reply_rank* that value; with *aggregate*
            what it made of them.

        Raises:
            WorkerDied: a rank died after it had begun the call.
            CallTimeout: naming the ranks that had not answered.
            ExecutorClosed: the executor was closed first.
        """
        if unique_reply_rank is not None:
            self._check_rank("unique_reply_rank", unique_reply_rank)
        if aggregate is not None:
            _check_callable("aggregate", aggregate)
        want = None if aggregate is not None else unique_reply_rank
        lead = unique_reply_rank if unique_reply_rank is not None else self._layout.output_rank
        return self._call(
            Shape.COLLECTIVE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            on_timeout=on_timeout,
            want=want,
            non_block=non_block,
            decode=Call.result
            if aggregate is None
            else functools.partial(Call.result, aggregate=aggregate, lead=lead),
        )

    @overload
    def gather(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: Literal[False] = False,
    ) -> list[Outcome]: ...
    @overload
    def gather(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: Literal[True],
    ) -> CallFuture: ...
    def gather(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: bool = False,
    ) -> list[Outcome] | CallFuture:
        """Call *method* on every rank, each for itself; return what became of it on each.

        A rank that raises, dies or runs out of time spoils only its own `Outcome`.
        """
        outcome: list[Outcome] | CallFuture = self._call(
            Shape.GATHER,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death="fail",
            non_block=non_block,
        )
        return outcome

    def scatter(
        self,
        method: str | Callable[..., Any],
        per_rank: Sequence[Sequence[Any]],
        timeout: float | None = None,
        *,
        kwargs_per_rank: Sequence[Mapping[str, Any]] | None = None,
        non_block: bool = False,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
    ) -> Any:
        """Call *method* on every rank as a whole, each with arguments of its own.

        Args:
            method: As in `collective_rpc`.
            per_rank: One tuple of positional arguments per rank.
            timeout: As in `collective_rpc`, like the rest.
            kwargs_per_rank: One mapping of keyword arguments per rank.
            non_block: As above.
            on_death: As above.
            retries: As above.
        """
        size = self._layout.world_size
        each = check_per_rank("per_rank", per_rank, size)
        named = check_per_rank(
            "kwargs_per_rank", kwargs_per_rank or [dict[str, Any]()] * size, size
        )
        for index, values in enumerate(each):
            if not isinstance(values, list | tuple):
                raise SpecError(f"per_rank[{index}]", values, "give the arguments as a tuple")
        return self._call(
            Shape.COLLECTIVE,
            method,
            [(tuple(a), k) for a, k in zip(each, named, strict=True)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            non_block=non_block,
        )

    def call(
        self,
        rank: int,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        non_block: bool = False,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
        on_timeout: Literal["leave", "restart"] = "leave",
    ) -> Any:
        """Call *method* on one rank and return its value; another rank's death does not matter."""
        self._check_rank("rank", rank)
        return self._call(
            Shape.SINGLE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            on_timeout=on_timeout,
            rank=rank,
            non_block=non_block,
        )

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        on_death: Literal["fail", "retry"] | None = None,
        retries: int = 1,
    ) -> CallFuture:
        """Call *method* on whichever rank is idle first: a work queue over independent replicas.

        Returns at once with a future, unless too many calls wait for a rank already.
        """
        future: CallFuture = self._call(
            Shape.POOL,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death=on_death,
            retries=retries,
            non_block=True,
        )
        return future

    def tell(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        """Have *method* run on every rank, or on one, and do not wait; errors are logged."""
        if rank is not None:
            self._check_rank("rank", rank)
        future = self._call(
            Shape.COLLECTIVE if rank is None else Shape.SINGLE,
            method,
            [_arguments(args, kwargs)],
            rank=rank,
            on_death="fail",
            non_block=True,
            tell=True,
        )
        name = method if isinstance(method, str) else getattr(method, "__name__", "a callable")
        future.add_done_callback(functools.partial(self._told, name))

    def stream(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
        window: int = 16,
    ) -> ReplyStream:
        """Call a method that is a generator, and return what it yields as it is yielded.

        Args:
            method: As in `collective_rpc`; returns a generator, or anything that can be iterated.
            timeout: Seconds until the last item; None waits without limit. ``hang_after`` limits
                the making of each item; how long its taker takes counts for nobody.
            args: As in `collective_rpc`, like the rest.
            kwargs: As above.
            rank: The rank to call, whose items are then yielded as they are. None calls every
                rank, as a whole, and yields (rank, item) as they come.
            window: How many items a rank may make before they are taken.

        The worker serves nothing else until the stream has ended. Take it to its end, or close it.
        """
        if rank is not None:
            self._check_rank("rank", rank)
        check_count("window", window)
        stream: ReplyStream = self._call(
            Shape.COLLECTIVE if rank is None else Shape.SINGLE,
            method,
            [_arguments(args, kwargs)],
            timeout=timeout,
            on_death="fail",
            rank=rank,
            non_block=True,
            window=window,
        )
        return stream

    @property
    def steps(self) -> W:
        """The step methods, typed as the worker class declares them; each answers one value."""
        return cast("W", Steps(self))

    @property
    def aio(self) -> AsyncExecutor:
        """The same calls for asyncio."""
        return AsyncExecutor(self)

    def __getattr__(self, name: str) -> Any:
        """Return the step method *name* as a method of the executor."""
        method = self.__dict__.get("_steps", {}).get(name)
        if method is None:
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return step_function(self, method)

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
        """Every rank: its process, incarnation, epoch, state and device."""
        return self._view().ranks

    @property
    def has_room(self) -> bool:
        """Whether a call with ``non_block=True`` would be accepted without blocking."""
        return self._inline is not None or self._plane.has_room()

    @property
    def is_failed(self) -> bool:
        """Whether the group has ended for good other than by `close`."""
        return self._inline is None and self._core.shared.cause is not None

    def status(self) -> Status:
        """Return how the executor is doing."""
        view = self._view()
        counts = {"in_flight": 0, "waiting": 0, "dropped_replies": 0}
        state = str(view.phase)
        checkpoint: Checkpoint | None = None
        if self._inline is None:
            cuts = self._core.shared.cuts
            checkpoint = None if cuts is None else cuts.latest()
            counts = self._plane.counts()
            devices = self._core.shared.devices()
        else:
            devices = self._inline.devices()
            state = "ended" if self._inline_closed else "serving"
        return Status(
            name=self._spec.name,
            state=state,
            epoch=view.epoch,
            world_size=self._layout.world_size,
            restarts=view.restarts,
            restarts_in_window=view.restarts_in_window,
            planned=view.planned,
            standby=view.standby,
            checkpoint=checkpoint,
            reports=view.reports,
            devices=devices,
            **counts,
        )

    def check_health(self, timeout: float = 10.0) -> None:
        """Return once every rank's main loop has answered.

        Raises:
            Unhealthy: a rank did not within *timeout* seconds; it says which, and what they are
                doing instead: busy, waiting, wedged, hung, stopped, starting or dead. Those that
                wait are told from those that are wedged by asking them beside their main loops,
                for which up to a second is added to a shorter *timeout*.
            ExecutorClosed: there is no group any more.
        """
        ranks = self.ranks
        before: dict[int, Vitals] = {}
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        future = self.gather(_ping, timeout, non_block=True)
        signs: dict[int, Sign] = {}
        if self._inline is None:  # else its one rank has answered
            self._check_may_wait("check_health")
            asking = min(PATIENCE, timeout / 2)
            if not _is_done(future, deadline - asking):
                before = {info.rank: Vitals.of(info.pid) for info in ranks}
                with self._core.shared.pulses.ask({i.rank: i.incarnation for i in ranks}) as asked:
                    if not _is_done(future, deadline):
                        asked.wait(deadline + PATIENCE - asking)
                    signs = asked.signs()
        try:
            outcomes = future.result()
            silent = [outcome.rank for outcome in outcomes if outcome.kind is not OutcomeKind.OK]
        except CallTimeout:  # it was never sent: the group is not whole
            silent = [info.rank for info in self.ranks]
        if not silent:
            return
        self._check_open()
        assert self._inline is None
        diagnoses = diagnose(silent, self.ranks, self._plane.running(), before, signs)
        states = {rank: each.state for rank, each in diagnoses.items()}
        details = {rank: str(each) for rank, each in diagnoses.items()}
        raise Unhealthy("check_health", silent, timeout, states, details)

    def register_failure_callback(self, callback: Callable[[ExitReason], None]) -> None:
        """Run ``callback(reason)`` once, when the group ends for good other than by `close`.

        After the fact it runs at once. Not for the first start: the constructor raises there.
        """
        _check_callable("callback", callback)
        if self._inline is not None:
            return
        self._core.shared.when_failed(callback)

    def events(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Have every event of the group, and what workers emit, handed to *callback*.

        Returns what unsubscribes. Callbacks run one after the other on a thread of their own, where
        a blocking call raises.
        """
        _check_callable("callback", callback)
        if self._inline is not None:
            key = next(self._listeners)
            self._inline_listeners[key] = callback
            return lambda: self._inline_listeners.pop(key, None) and None
        return self._core.shared.listen(callback)

    # --- keeping ------------------------------------------------------------------------

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
        self._core.check_process()
        self._check_may_wait("checkpoint")
        return self._save(timeout, under_hold=False)

    def _check_resharding(self, size: int) -> None:
        spec = self._spec
        if spec.checkpoint is None or spec.strategy is Strategy.ONE_FOR_ONE:
            return
        if size != self.world_size and spec.worker.reshard is WorkerActor.reshard:
            raise SpecError(
                "world_size",
                size,
                f"what is kept is the state of {self.world_size} ranks; "
                f"give {spec.worker.__name__} a method reshard(states)",
            )

    def _save(self, timeout: float | None, *, under_hold: bool) -> Checkpoint:
        plane, cuts = self._plane, self._core.shared.cuts
        assert cuts is not None
        call = saving_call(plane, next(self._seq), timeout, time.monotonic())
        return save_now(plane, cuts, call, under_hold=under_hold)

    # --- changing -----------------------------------------------------------------------

    def restart(self, rank: int | None = None, *, timeout: float | None = None) -> None:
        """Restart *rank* and those its strategy ties to it, or every rank; nothing failed.

        Waits for the calls in flight; new ones wait until the group is whole again. With a
        `CheckpointPolicy` the state of the ranks is taken first, so that none of it is lost.

        Raises:
            TimeoutError: *timeout* seconds passed before the calls in flight had ended, and nothing
                was changed; or before the group was whole again, which goes on by itself. The
                message says which.
        """
        if rank is not None:
            self._check_rank("rank", rank)
        ranks = frozenset(range(self.world_size) if rank is None else (rank,))
        self._change(lambda: Planned(ranks=ranks), timeout)

    def resize(
        self, world_size: int, *, layout: Layout | None = None, timeout: float | None = None
    ) -> None:
        """Form the group anew with *world_size* ranks, after the calls in flight.

        Args:
            world_size: How many.
            layout: How they are laid out; needed where the executor was built with a layout.
            timeout: As in `restart`.
        """
        check_count("world_size", world_size)
        if layout is None:
            if not self._spec.is_plain:
                raise SpecError("layout", None, "say how the new ranks are laid out")
            layout = Layout(tensor=world_size)
        layout.check(world_size)
        if self._inline is not None and world_size != 1:
            raise SpecError("world_size", world_size, 'launch="inline" has one rank')
        share = self._spec.devices_per_rank
        DevicePool.of(self._spec.devices, world_size, devices_per_rank=share).close()
        DevicePool.of(self._spec.devices, world_size).close()
        self._check_resharding(world_size)
        plan = layout
        self._change(lambda: Planned(size=world_size, layout=plan), timeout)
        self._layout = layout

    def drain(self, timeout: float | None = None) -> None:
        """Return once every call in flight has been answered; new ones wait until then.

        Raises:
            TimeoutError: *timeout* seconds passed first.
        """
        self._check_open()
        if self._inline is not None:
            return
        limit = None if timeout is None else check_seconds("timeout", timeout)
        self._check_may_wait("drain")
        if not self._plane.wait_idle(None if limit is None else time.monotonic() + limit):
            msg = f"calls are still in flight after {timeout:g} s"
            raise TimeoutError(msg)
        self._plane.resume()

    # --- ending -------------------------------------------------------------------------

    def close(self) -> None:
        """Stop every rank and give everything back; calls after it raise `ExecutorClosed`.

        Calls in flight may end while ranks are being asked to stop. Idempotent, from any thread.
        """
        if self._inline is not None:
            self._inline_closed = True
            self._inline.close()
            return
        self._core.end()

    def request_close(self) -> None:
        """Ask for the end and return at once; for who must not wait."""
        if self._inline is not None:
            self.close()
        else:
            self._core.request_end()

    def kill(self) -> None:
        """Kill every rank now and end the executor; returns at once. `close` is the good order."""
        if self._inline is not None:
            self.close()
        else:
            self._core.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.status().state
        return (
            f"<Executor {self.name!r}: {self.world_size} x {self._spec.worker.__name__}, {state}>"
        )

    # --- inside -------------------------------------------------------------------------

    def _call(
        self,
        shape: Shape,
        method: str | Callable[..., Any],
        each: list[tuple[tuple[Any, ...], Mapping[str, Any]]],
        *,
        timeout: float | None = None,
        on_death: OnDeath | None = None,
        retries: int = 1,
        on_timeout: OnTimeout = "leave",
        want: int | None = None,
        rank: int | None = None,
        non_block: bool = False,
        tell: bool = False,
        window: int | None = None,
        decode: Callable[[Call], Any] = Call.result,
    ) -> Any:
        name, declared = self._declared(method, each)
        terms = terms_of(
            now=0.0 if timeout is None else time.monotonic(),
            timeout=timeout,
            on_death=on_death or ("retry" if declared.idempotent else "fail"),
            retries=retries,
            on_timeout=on_timeout,
            tell=tell,
        )
        if self._inline is not None:
            if window is not None:
                self._check_open()
                return InlineStream(self._inline.stream(name, method, *each[0], rank))
            return self._call_inline(
                shape,
                name=name,
                method=method,
                what=each[0],
                want=want,
                decode=decode,
                non_block=non_block,
            )
        self._core.check_process()
        if not non_block:
            self._check_may_wait(name)
        tap = self._tap(name, method, shape, rank, is_stream=window is not None)
        if tap is not None:
            method = tap.method
        span = self._core.shared.trace.call(name, shape, rank, is_stream=window is not None)
        payloads = self._payloads(name, method, each, span)
        call = Call(next(self._seq), name, shape, payloads, terms)
        if span is not None:
            span.sent_as(call.seq)
            call.span = span
        call.want = want
        call.rank = rank
        call.tap = tap
        if window is not None:
            call.stream = Incoming(window)
        limit = declared.hang_after
        if limit is None:
            limit = self._spec.hang_after
        call.hang_after = None if limit == math.inf else limit
        return self._submit(call, decode) if non_block else self._wait_for(call, decode)

    def _declared(
        self,
        method: str | Callable[..., Any],
        each: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> tuple[str, Declared]:
        """Return the name of *method* and what is declared of it; checks the arguments."""
        if isinstance(method, str):
            known = self._methods.find(method)
            for args, kwargs in each:
                known.check(args, kwargs)
            return method, known.declared
        if callable(method):
            return getattr(method, "__qualname__", None) or repr(method), _UNDECLARED
        raise SpecError("method", method, "give a method's name or a callable")

    def _submit(self, call: Call, decode: Callable[[Call], Any]) -> CallFuture | ReplyStream:
        """Send *call*, or have it wait for its turn, and return what becomes of it."""
        plane = self._plane
        try:
            plane.submit(call, waits=False)
        except BaseException as error:
            plane.cancel(call, error)
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:  # not by who settles it: what exports spans may take its time
            later = functools.partial(self._core.shared.callbacks.run, call.span.end)
            plane.when_settled(call, later)
        if call.terms.deadline is not None:
            self._expire_later(call, call.terms.deadline)
        if call.stream is not None:
            return ReplyStream(call, plane, self._core.shared.callbacks)
        return CallFuture(call, plane, self._core.shared.callbacks, decode)

    def _wait_for(self, call: Call, decode: Callable[[Call], Any]) -> Any:
        """Send *call* and return its value, or raise its error."""
        plane = self._plane
        try:
            plane.submit(call, waits=True)
            if not plane.wait(call, call.terms.deadline):
                _restart_late(self._core, call, plane.expire(call))
        except BaseException as error:
            if isinstance(error, ExecutorClosed):
                living.stay_until_the_end()
            plane.cancel(call, error)  # Ctrl-C: nobody waits for the answer any more
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:
            call.span.end(call)
        if interrupts.pending:
            interrupts.strike()
        if isinstance(call.error, ExecutorClosed):
            living.stay_until_the_end()
        return decode(call)

    def _tap(
        self, name: str, method: Any, shape: Shape, rank: int | None, *, is_stream: bool
    ) -> CallTap | None:
        """Return what looks on at a call, where anything does."""
        probe = self._core.shared.probe
        if probe is None:
            return None
        return probe.tap(name, method, shape=shape.name.lower(), rank=rank, is_stream=is_stream)

    def _payloads(
        self,
        name: str,
        method: object,
        each: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
        span: CallSpan | None,
    ) -> Sequence[Payload]:
        """Return what is to be sent, one for all ranks or one for each."""
        if span is None and len(each) == 1 and isinstance(method, str):
            args, kwargs = each[0]
            if not args and not kwargs:  # the same bytes each time
                bare = self._bare.get(method)
                if bare is None:
                    encoded = encode((method, (), _NO_KEYWORDS), name)
                    bare = self._bare[method] = (Payload.of(encoded),)
                return bare
        payloads: list[Payload] = []
        try:
            for args, kwargs in each:
                what = (method, args, kwargs)
                encoded = encode(
                    what if span is None else (*what, span.carrier), f"the arguments of {name}"
                )
                payloads.append(self._plane.pack(encoded))
        except BaseException as error:
            if span is not None:
                span.refused(error)
            for payload in payloads:  # what one rank was to get cannot travel
                payload.close()
            raise
        return payloads

    def _call_inline(
        self,
        shape: Shape,
        *,
        name: str,
        method: Any,
        what: tuple[tuple[Any, ...], Mapping[str, Any]],
        want: int | None,
        decode: Callable[[Call], Any],
        non_block: bool,
    ) -> Any:
        self._check_open()
        assert self._inline is not None
        future: Future[Any] = Future()
        try:
            value = self._inline.run(name, method, *what)
        except Exception as error:  # noqa: BLE001  # settled below, as from a process
            if shape is Shape.GATHER:
                future.set_result([Outcome(0, OutcomeKind.ERROR, error=error)])
            else:
                future.set_exception(error)
        else:
            aggregate = getattr(decode, "keywords", {}).get("aggregate")
            if shape is Shape.GATHER:
                value = [Outcome(0, OutcomeKind.OK, value)]
            elif shape is Shape.COLLECTIVE and aggregate is not None:
                value = aggregate([value], 0)
            elif shape is Shape.COLLECTIVE and want is None:
                value = [value]
            future.set_result(value)
        return future if non_block else future.result()

    def _expire_later(self, call: Call, deadline: float) -> None:
        core = self._core  # not the executor: a timer must not keep a forgotten one alive

        def expire() -> None:
            _restart_late(core, call, core.shared.plane.expire(call))

        call.timer = core.runtime.hub.call_at(deadline, expire)
        if call.done:
            call.timer.cancel()

    def _change(self, make: Callable[[], Planned], timeout: float | None) -> None:
        """Have a planned change carried out while nothing is in flight; tries until it is."""
        self._check_open()
        if self._inline is not None:
            return
        self._check_may_wait("a planned change")
        limit = None if timeout is None else check_seconds("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit
        shared = self._core.shared
        while True:
            with shared.changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not shared.changed.wait_for(lambda: shared.view.phase in _SETTLED, left):
                    msg = f"the group is not whole after {timeout:g} s; nothing was changed"
                    raise TimeoutError(msg)
            self._check_open()
            if not self._plane.wait_idle(deadline):
                msg = f"calls are still in flight after {timeout:g} s; nothing was changed"
                raise TimeoutError(msg)
            try:
                if shared.cuts is not None and shared.cuts.is_unsaved():
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    self._save(left, under_hold=True)
                plan = make()
                self._core.tell(plan)
                while not plan.done.wait(max(0.01, _until(deadline, 1.0))):
                    if shared.gone.is_set():
                        break
                    if plan.accepted and deadline is not None and time.monotonic() >= deadline:
                        msg = f"the change is under way, not done after {timeout:g} s; it goes on"
                        raise TimeoutError(msg)
            finally:
                self._plane.resume()
            if plan.accepted:
                return
            self._check_open()

    def _check_open(self) -> None:
        if self._inline is not None:
            if self._inline_closed:
                msg = f"executor {self.name} was closed; build a new one"
                raise ExecutorClosed(msg)
            return
        self._core.check_process()
        self._plane.check_open()

    def _check_may_wait(self, what: str) -> None:
        shared = self._core.shared
        if shared.callbacks.is_current():
            msg = f"{what}: a callback may not wait for its executor; use non_block=True"
            raise WouldDeadlock(msg)

    def _check_rank(self, field: str, rank: object) -> None:
        size = self._layout.world_size
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
            raise SpecError(field, rank, f"give a rank from 0 to {size - 1}")

    def _view(self) -> GroupView:
        return self._inline.view() if self._inline is not None else self._core.shared.view

    def _told(self, name: str, future: Future[Any]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and self._inline is None:
            self._core.runtime.scribe.log.error(
                "phalanx.tell_failed", group=self.name, method=name, error=repr(error)
            )

    def _emitted_inline(self, rank: int, value: Any) -> None:
        event = Emitted(self.name, rank, 1, 1, value, time.monotonic())
        for listener in list(self._inline_listeners.values()):
            listener(event)


def _restart_late(core: Core, call: Call, late: Mapping[int, int]) -> None:
    """Have those who owe *call* (rank: incarnation) restarted, where it asks for that."""
    if call.terms.on_timeout != "restart":
        return
    detail = f"{call.name} (call {call.seq}) took longer than {call.terms.timeout:g} s"
    for rank, incarnation in late.items():
        core.tell(Overdue(rank, incarnation, "call", detail))


def _until(deadline: float | None, longest: float) -> float:
    """Return how long to wait for *deadline*, in pieces of no more than *longest* seconds."""
    return longest if deadline is None else min(longest, max(0.0, deadline - time.monotonic()))


def _is_done(future: Future[Any], deadline: float) -> bool:
    """Return whether *future* is done by *deadline* (monotonic)."""
    with suppress(TimeoutError):
        future.exception(max(0.0, deadline - time.monotonic()))
    return future.done()


def _ping(_worker: object) -> None:
    """Answer, from the main loop."""


_UNDECLARED = Declared()
_NO_KEYWORDS: Mapping[str, Any] = {}


def _arguments(args: object, kwargs: object) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of one call if that is what they are."""
    whole: Any = args  # what isinstance makes of it one checker knows, and the other does not
    if kwargs is None and isinstance(args, tuple):
        return whole, _NO_KEYWORDS
    if not isinstance(args, list | tuple):
        raise SpecError("args", args, "give the positional arguments as a tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError("kwargs", kwargs, "give the keyword arguments as a mapping")
    return tuple(cast("Sequence[Any]", args)), cast("Mapping[str, Any]", kwargs or {})


def _check_callable(field: str, value: object) -> None:
    if not callable(value):
        raise SpecError(field, value, "give something that can be called")
