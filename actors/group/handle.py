"""`Group`: the handle of a rank group, which outlives the user's `Executor` object.

- A call is accepted or refused as a whole; a refused one leaves nothing in the plane or in memory.
- A blocking call runs in its caller's thread from the first byte to the last.
- Ending is idempotent, and may be requested by several threads at once, by a callback, the garbage
  collector or the end of the program; methods that wait return once every resource is released.
- State that other threads wait for changes under `changed`, which is notified.
- A callback for the end of the group runs once, also if it is registered after the end.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pykka

from phalanx.actors.calls.call import DEFAULT, Call, check_timeout, options_of
from phalanx.actors.calls.callbacks import CallbackThread
from phalanx.actors.calls.futures import CallFuture
from phalanx.actors.calls.plane import CallPlane
from phalanx.actors.calls.streams import ReplyStream
from phalanx.actors.checkpoint.coordinator import checkpoint_call, coordinator_of
from phalanx.actors.health.hang_detector import HangLimits
from phalanx.actors.health.health_check import check_health
from phalanx.actors.health.heartbeat import HeartbeatClient
from phalanx.actors.observe.hooks import current_probe
from phalanx.actors.observe.status_feed import status_of
from phalanx.actors.observe.tracing import GroupTrace
from phalanx.actors.signals.driver_exit import open_executors
from phalanx.actors.spec.factory import unpicklable_argument
from phalanx.actors.spec.results import Status
from phalanx.actors.spec.worker import Methods
from phalanx.runtime import (
    RELAY_PRELOAD,
    Payload,
    ReentrantLock,
    SocketChannel,
    acquire_shared,
    check_machine,
    descriptor_limit,
    encode,
    is_holding,
    release_shared,
)
from phalanx.supervision import (
    SHUTDOWN,
    CallerError,
    CallTimeout,
    ExecutorClosed,
    NotPicklable,
    Phase,
    SpecError,
    StartFailed,
    check_count,
    check_seconds,
    start_actor,
    wait_event,
    wait_periods,
)

from .actor import GroupActor, PlannedChange
from .launcher import spawn_thread, too_few_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.actors.calls.call import OnTimeout, Shape
    from phalanx.actors.calls.rank import Progress
    from phalanx.actors.calls.reader import Poller
    from phalanx.actors.calls.streams import StreamInbox
    from phalanx.actors.checkpoint.coordinator import CheckpointCoordinator
    from phalanx.actors.observe.hooks import CallProbe, GroupProbe, Probe
    from phalanx.actors.observe.tracing import CallSpan
    from phalanx.actors.spec.checkpoint_policy import Checkpoint
    from phalanx.actors.spec.layout import Layout
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.cluster import NodePool, Reservation
    from phalanx.runtime import Arena, DeviceStatus, Frame, NodeInfo, RankInfo, Runtime
    from phalanx.supervision import ExitReason, ProtectedActor, StartContext

    from .launcher import Spawn
    from .worker import Worker

    Message = PlannedChange | tuple[Worker, Frame] | partial[object]

_QUIET = 0.5  # seconds of a close before the log says what it waits for, and between two looks
_TEARDOWN = 30.0  # seconds beyond the stop policy for trees, devices and shared parts to go
_SETTLED = (Phase.SERVING, Phase.CLOSING, Phase.ENDED)
_NO_KEYWORDS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The supervisor that an executor is a child of.

    Attributes:
        ctx: The start as whose child it runs.
        on_end: Called with the reason once the group has ended, once, whatever the cause.
        checkpoints: Coordinates checkpoints beyond one executor; None without a policy.
    """

    ctx: StartContext
    on_end: Callable[[ExitReason], None]
    checkpoints: CheckpointCoordinator | None


class Group:
    """One rank group: what its actor and its users' threads share, and the way to end it.

    Args:
        runtime: The shared parts to use; None takes this process's own.
        named: The name its user gave, which no other may have; None for none.
        replace: Whether an executor that has that name is ended first.
        parent: The supervisor that it is a child of; None if it stands alone.
        clock: The monotonic clock of its limits and of the runtime's event loop.
        jitter: Returns the share of a back-off's spread that a wait gets, from 0 to below 1.
        poller: The readiness of channels; None for epoll(7).
        spawn: Runs launches beside the actor.
        begin: Starts the thread of the group's actor.
        channel: Makes a channel to a worker that is not there yet, from the arena and the epoch.

    Attributes:
        actor: The only thread that changes the membership.
        methods: Those of its worker class.
        view: The group's status; replaced as a whole.
        ready: Set once the group has served for the first time, or has ended.
        gone: Set once everything has been given back.
        start_error: Why the group never came up.
        owns_checkpoints: Whether *checkpoints* end with the executor.
        cause: Why the group ended by itself; None if it was closed or lives.
        devices: Returns how the devices are.
        nodes: Returns how the nodes of the cluster are.
        machines: Those of the cluster; None without one.
        probe: The hook of fault injection; None if there is none.
        numbers: Numbers of calls.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime | None,
        *,
        named: str | None = None,
        replace: bool = False,
        parent: Parent | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        poller: Poller | None = None,
        spawn: Spawn = spawn_thread,
        begin: Callable[[ProtectedActor], None] = start_actor,
        channel: Callable[[Arena, int], SocketChannel] = SocketChannel.create,
    ) -> None:
        probe = current_probe()
        self.clock = clock
        self.jitter = jitter
        self.spawn = spawn
        self.channel = channel
        self.actor: GroupActor
        self._begin = begin
        self._poller = poller
        self.spec = spec = spec if probe is None else probe.adjust(spec)
        self.methods = Methods(spec.worker)
        self._hang_after = spec.limits.hang
        self._bare: dict[str, tuple[Payload]] = {}  # calls without arguments, by method
        self.view = Status(name=spec.name, layout=spec.layout)
        self.ready, self.gone = threading.Event(), threading.Event()
        self.start_error: BaseException | None = None
        self.cause: ExitReason | None = None
        self.closing = False
        self.devices: Callable[[], tuple[DeviceStatus, ...]] = tuple
        self.nodes: Callable[[], tuple[NodeInfo, ...]] = tuple
        self.machines: NodePool | None = None
        self.probe: GroupProbe | None = None
        self.numbers = itertools.count(1)
        self.trace = GroupTrace(spec.name, spec.worker.__name__)
        self.heartbeats = HeartbeatClient()
        self._state_lock = ReentrantLock()
        self.changed = threading.Condition(cast("Any", self._state_lock))
        self._keys = itertools.count()
        self._subscribers: dict[int, Callable[[Any], None]] = {}
        self._when_failed: list[Callable[[ExitReason], None]] = []
        # Of the context this alone, which keeps no executor in memory.
        self._given_up = threading.Event() if parent is None else parent.ctx.begun
        self._pid = os.getpid()
        self._lock = ReentrantLock()  # `request_close` acts once, and may be called within it
        self._before: Group | None = None
        try:
            if named is not None:
                self._before = open_executors.claim(named, self, replace=replace)
            self._build(runtime, parent, probe)
        except BaseException:
            open_executors.remove(self, instead=self._before)
            raise
        # Only now: from here on any thread may end it, and there is something to end.
        open_executors.add(self)

    def _build(self, runtime: Runtime | None, parent: Parent | None, probe: Probe | None) -> None:
        spec = self.spec
        self._room = descriptor_limit.Reservation()
        check_machine()
        self._reserve(spec.world_size, serving=0)
        release = ExitStack()
        release.callback(self._room.set, 0)
        made = ExitStack()  # gives back, if there will be no actor, what else the actor does
        try:
            self.runtime = acquire_shared() if runtime is None else runtime
            if runtime is None:
                release.callback(release_shared, self.runtime)
                if parent is not None:  # what was imported outlives a restart
                    parent.ctx.hold(acquire_shared, release_shared)
            # Boots while the rest is being made.
            for rank in range(len(spec.launch.rank_env) or 1):
                self.runtime.launcher.warm(spec.launch.preload, spec.launch.env_of(rank))
            if spec.is_remote:
                self.runtime.launcher.warm(RELAY_PRELOAD)
            # Held: it takes events when the runtime, another's, has been closed meanwhile.
            self._collector = collector = self.runtime.collector
            if parent is not None:
                parent.ctx.emit_by(collector.emit)
            self.log = collector.log.bind(group=spec.name)
            checkpoints = None if parent is None else parent.checkpoints
            self.owns_checkpoints = checkpoints is None
            self.checkpoints = coordinator_of(spec) if checkpoints is None else checkpoints
            self.callbacks = CallbackThread(self._callback_failed)
            self.hang_limits = HangLimits(
                self.runtime.loop,
                spec.limits.stopped,
                lambda due: self.post(self.actor.health.check_limits, due),
            )
            made.callback(self.hang_limits.close)
            self.plane = CallPlane(
                self.runtime.loop,
                spec.layout,
                depth=spec.limits.queue_depth,
                snapshots=self.checkpoints,
                spins=not spec.is_remote,
                log=self.log,
                on_end=lambda rank, number: self.post(self.actor.expect_exit, rank, number),
                on_busy=self.hang_limits.wake,
                on_desync=lambda wire: self.post(self.actor.health.out_of_step, wire),
                inner=(self._state_lock.is_mine,),
                poller=self._poller,
                clock=self.clock,
            )
            made.callback(self.plane.close)
            if probe is not None:
                self.probe = probe.attach(spec, self)
            look = None if parent is None else parent.ctx.snapshot
            unshow = self.runtime.status_source.add(partial(status_of, spec, self, look))
            release.callback(unshow)
            release.callback(open_executors.remove, self)
            self._begin(GroupActor(self, release.close, parent, made))
        except BaseException as error:
            if not self.gone.is_set():
                made.close()
            release.close()
            if descriptor_limit.is_shortage(error):
                raise too_few_descriptors(error) from error
            raise

    def _callback_failed(self, error: BaseException) -> None:
        with suppress(Exception):
            self.log.error("phalanx.callback_failed", exc_info=error)

    # --- the actor's part ---------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Put *message* into the actor's mailbox; void once it has ended."""
        with suppress(pykka.ActorDeadError):
            self.actor.actor_ref.tell(message)

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have *call* made on the actor's thread; void once the group has ended."""
        self.tell(partial(call, *args))

    def publish(self, event: Any) -> None:
        """Publish *event* to the log, fault injection, tracing and the subscribers, in this order.

        Raises nothing, and waits for no callback.
        """
        self._collector.emit(event)
        if self.probe is not None:
            self.probe.on_point("event", event=event)
        self.trace.on_event(event)
        self.deliver(event)

    def report_error(self, error: BaseException) -> None:
        """Log *error*, which is a fault of ours."""
        with suppress(Exception):
            self.log.error("phalanx.executor_failed", exc_info=error)

    def show(self, view: Status) -> None:
        """Publish *view* as what the group looks like now."""
        with self.changed:
            self.view = view
            self.changed.notify_all()

    def deliver(self, event: Any) -> None:
        """Hand *event* to the subscribers, on the thread of the callbacks."""
        with self.changed:
            subscribers = list(self._subscribers.values())
        for subscriber in subscribers:
            self.callbacks.run(subscriber, event)

    def tell_failed(self, reason: ExitReason) -> None:
        """Run what was registered for the end of the group."""
        with self.changed:
            callbacks, self._when_failed = self._when_failed, []
        for callback in callbacks:
            self.callbacks.run(callback, reason)

    # --- inspection ---------------------------------------------------------------------

    def has_room(self) -> bool:
        """See `CallPlane.has_room`."""
        self.check_process()
        return self.plane.has_room()

    def when_room(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        """See `CallPlane.when_room`."""
        self.check_process()
        return self.plane.when_room(wake)

    @property
    def is_failed(self) -> bool:
        """Whether it has ended by itself."""
        return self.cause is not None

    @property
    def exit_reason(self) -> ExitReason | None:
        """Why it has ended; None while it has not."""
        return (self.cause or SHUTDOWN) if self.gone.is_set() else None

    def ranks(self) -> tuple[RankInfo, ...]:
        """Return its ranks, and what each is running."""
        self.check_process()
        progress = self.plane.progress_by_rank()
        return tuple(
            _with_progress(info, progress[info.rank]) if info.rank in progress else info
            for info in self.view.ranks
        )

    def status(self) -> Status:
        """Return how the executor is doing."""
        ranks = self.ranks()  # first: in a forked child that raises
        counts: dict[str, Any] = dict(self.plane.counts())
        return replace(
            self.view,
            ranks=ranks,
            checkpoint=None if self.checkpoints is None else self.checkpoints.store.latest(),
            devices=self.devices(),
            nodes=self.nodes(),
            **counts,
        )

    def subscribe(self, subscriber: Callable[[Any], None]) -> Callable[[], None]:
        """Hand every event to *subscriber* from now on; return what unsubscribes it."""
        key = next(self._keys)
        with self.changed:
            self._subscribers[key] = subscriber

        def unsubscribe() -> None:
            with self.changed:
                self._subscribers.pop(key, None)

        return unsubscribe

    def when_failed(self, callback: Callable[[ExitReason], None]) -> None:
        """Run *callback* once the group has ended by itself; at once if it has."""
        with self.changed:
            if self.cause is None:
                self._when_failed.append(callback)
                return
        self.callbacks.run(callback, self.cause)

    def check_process(self) -> None:
        """Raise unless this is the process that built the executor."""
        if self._pid != os.getpid():
            msg = (
                f"executor {self.spec.name} belongs to the parent process: build one after forking"
            )
            raise ExecutorClosed(msg)

    def check_open(self) -> None:
        """Raise `ExecutorClosed` if it takes no calls, or not from this process."""
        self.check_process()
        try:
            self.plane.check_open()
        except ExecutorClosed:
            open_executors.stay_until_the_end()
            raise

    def _check_may_wait(self, what: str) -> None:
        self.plane.check_may_enter(what, waits=True)
        self.callbacks.check_may_wait(what)

    # --- calls --------------------------------------------------------------------------

    def check_health(self, timeout: float) -> None:
        """See `Executor.check_health`."""
        check_health(self, timeout)

    def call(
        self,
        shape: Shape,
        method: str | Callable[..., Any],
        each: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
        *,
        timeout: float | None = None,
        retries: int | None = None,
        on_timeout: OnTimeout = "leave",
        want: int | None = None,
        rank: int | None = None,
        non_block: bool = False,
        tell: bool = False,
        stream: StreamInbox | None = None,
        aggregate: Callable[[list[Any], int], Any] | None = None,
        lead: int = 0,
        size: int | None = None,
        of_output: bool = False,
        at_once: bool = False,
    ) -> Any:
        """Make a call, and return its value, its future or its stream; see `Call`.

        Args:
            each: Arguments: one pair for all ranks, or one for each.
            tell: Whether the outcome is discarded.
            at_once: With *non_block*: never block, however many calls are queued.
        """
        if timeout is not None:
            check_timeout(timeout)  # first: arguments in its place are missing elsewhere
        name, declared = self.methods.declared_of(method, each)
        if retries is None:
            retries = 1 if declared.idempotent else 0
        options = DEFAULT
        if timeout is not None or retries != 0 or tell or on_timeout != "leave":
            options = options_of(
                now=0.0 if timeout is None else self.plane.clock(),
                timeout=timeout,
                retries=retries,
                on_timeout=on_timeout,
                tell=tell,
            )
        self.check_process()
        self.plane.check_may_enter(name, waits=not non_block)
        if not non_block:
            self.callbacks.check_may_wait(name)
        probe: CallProbe | None = None
        if self.probe is not None:
            probe = self.probe.call_probe(name, method, is_stream=stream is not None)
            method = probe.method
        seq = next(self.numbers)
        tracer, span = self.trace.telemetry.tracer, None
        if tracer is not None:
            span = self.trace.call(tracer, name, shape, seq, rank, is_stream=stream is not None)
        payloads = self._payloads(name, method, each, span)
        call = Call(seq, name, shape, payloads, options)
        call.span = span
        call.want = want
        call.rank = rank
        call.probe = probe
        call.stream = stream
        limit = declared.hang_after
        if limit is None:
            limit = self._hang_after
        call.hang_after = None if limit == math.inf else limit
        call.aggregate = aggregate
        call.lead = lead
        call.size = size
        call.of_output = of_output
        if non_block:
            return self._submit(call, at_once=at_once)
        return self._wait_for(call)

    def _submit(self, call: Call, *, at_once: bool) -> CallFuture | ReplyStream:
        """Send *call*, or have it wait for its turn, and return what becomes of it."""
        plane = self.plane
        try:
            plane.submit(call, waits=False, at_once=at_once)
        except BaseException as error:
            plane.abandon(call, error)
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:  # not on the settling thread: an exporter of spans may be slow
            later = partial(self.callbacks.run, call.span.end)
            plane.when_settled(call, later)
        if call.options.deadline is not None:
            expire = partial(self._expire, call)
            call.timer = self.runtime.loop.call_at(call.options.deadline, expire)
            if call.done:
                call.timer.cancel()
        if call.stream is not None:
            return ReplyStream(call, plane, self.callbacks)
        return CallFuture(call, plane, self.callbacks)

    def _wait_for(self, call: Call) -> Any:
        """Send *call* and return its value, or raise its error."""
        plane = self.plane
        try:
            plane.submit(call, waits=True)
            if not plane.wait(call, call.options.deadline):
                self._expire(call)
        except BaseException as error:
            if isinstance(error, ExecutorClosed):
                open_executors.stay_until_the_end()
            plane.abandon(call, error)  # Ctrl-C: no caller waits for the answer
            if call.span is not None:
                call.span.refused(error)
            raise
        if call.span is not None:
            call.span.end(call)
        if isinstance(call.error, ExecutorClosed):
            open_executors.stay_until_the_end()
        return call.result()

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
                try:
                    whole = what if span is None else (*what, span.carrier)
                    limit = self.plane.inline_limit
                    encoded = encode(whole, f"the arguments of {name}", limit)
                except NotPicklable as error:
                    raise unpicklable_argument(name, args, kwargs, error) from error.__cause__
                payloads.append(self.plane.pack(encoded))
        except BaseException as error:
            if span is not None:
                span.refused(error)
            for payload in payloads:  # what one rank was to get cannot travel
                payload.close()
            raise
        return payloads

    def _expire(self, call: Call) -> None:
        """Settle *call* as timed out, and restart the ranks that owe it if its options say so."""
        late = self.plane.expire(call)
        if call.options.on_timeout == "restart":
            why = f"{call.name} (call {call.seq}) took longer than {call.options.timeout:g} s"
            for rank, incarnation in late.items():
                self.post(self.actor.health.overdue, rank, incarnation, call.wire, why)

    # --- starting -----------------------------------------------------------------------

    def start(self) -> None:
        """Have its ranks started, once what had its name has ended."""
        before, self._before = self._before, None
        if before is not None:
            if not before.is_ending:
                self.log.warning("phalanx.executor_replaced")
            before.close()
        self.post(self.actor.begin)

    def wait_ready(self) -> None:
        """Return once the group has served for the first time.

        One that its supervisor gives up meanwhile is killed.

        Raises:
            StartFailed, CallerError: it did not.
            ExecutorClosed: it was closed meanwhile.
        """
        # No deadline of its own: each start has one, and so has the stop that follows a failed one.
        while not wait_event(self.ready, _QUIET):
            if self._given_up.is_set():
                self.kill()
        if self.closing:
            open_executors.stay_until_the_end()
        error = self.start_error
        if self.view.phase in (Phase.CLOSING, Phase.ENDED) and error is not None:
            wait_event(self.gone, _TEARDOWN)
            if isinstance(error, StartFailed | CallerError):
                raise error
            what = (
                f"executor {self.spec.name} could not be started: {type(error).__name__}: {error}"
            )
            raise StartFailed(what) from error
        if self.closing:
            raise ExecutorClosed(f"executor {self.spec.name} was closed during its start")

    # --- changing -----------------------------------------------------------------------

    def reserve(self, world_size: int) -> None:
        """Set descriptors aside for *world_size* ranks, some of which may have theirs.

        Raises:
            SpecError: there are too few.
        """
        self.check_open()
        self._reserve(world_size, serving=len(self.view.ranks) + self.spec.policy.standby)

    def _reserve(self, world_size: int, *, serving: int) -> None:
        states = self.spec.checkpoint
        kept = states.keep if states is not None and states.where is None else 0
        free = descriptor_limit.free()
        if serving:
            free += descriptor_limit.FOR_ALL + serving * (descriptor_limit.FOR_SERVING + kept)
        ranks = world_size + self.spec.policy.standby
        each = descriptor_limit.FOR_RANK + self.spec.is_remote * descriptor_limit.FOR_LINK + kept
        needed = descriptor_limit.FOR_ALL + ranks * each
        if needed > free:
            raise SpecError(
                "world_size",
                world_size,
                f"{needed} descriptors are needed, with {ranks - world_size} spares, and {free} "
                f"are free of the {descriptor_limit.hard_limit()} that this process may have: "
                f"enough for {descriptor_limit.ranks_that_fit(free, each)} ranks; "
                "raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd, docker run --ulimit)",
            )
        self._room.set(needed)

    def save(self, timeout: float | None, *, under_hold: bool = False) -> Checkpoint:
        """Have every rank store its state, and return what is kept of it.

        *under_hold*: this thread has paused dispatch.
        """
        assert self.checkpoints is not None
        self.check_process()
        if not under_hold:
            self._check_may_wait("checkpoint")
        call = checkpoint_call(self.plane, next(self.numbers), timeout)
        call.under_hold = under_hold  # new calls are paused, and this one is not
        self._wait_for(call)
        return self.checkpoints.outcome(call)

    def resize(self, world_size: int, layout: Layout | None, timeout: float | None) -> None:
        """Have the group formed anew with that many ranks; see `Executor.resize`."""
        self.reserve(world_size)
        plan = partial(PlannedChange, size=world_size, layout=layout)
        machines = self.machines
        if machines is None:
            self.change(plan, timeout)
            return
        reservation: Reservation | None = None
        with ExitStack() as reserved:

            def await_machines(deadline: float | None) -> None:
                nonlocal reservation
                if reservation is None:  # not before: now there is a cluster
                    reservation = reserved.enter_context(machines.reserve_machines(world_size))
                is_there = machines.await_machines(
                    reservation, deadline, lambda: not self.is_ending
                )
                if not is_there and not self.is_ending:
                    what = f"there are no machines for {world_size} ranks"
                    raise TimeoutError(f"{what} after {timeout:g} s; nothing was changed")

            def confirmed() -> PlannedChange | None:
                if reservation is None or not machines.has_machines(world_size):
                    return None  # one was lost while calls in flight were awaited
                return plan(reservation=reservation)

            self.change(confirmed, timeout, before=await_machines)

    def change(
        self,
        make: Callable[[], PlannedChange | None],
        timeout: float | None,
        *,
        force: bool = False,
        before: Callable[[float | None], None] | None = None,
    ) -> None:
        """Have a planned change carried out while nothing is in flight; try until it is.

        Args:
            make: Returns the change, at each try; None to try again.
            force: Calls may be in flight, and no state is stored.
            before: Called with the deadline before each try, while calls go on.

        Raises:
            TimeoutError: *timeout* seconds passed first; the message says what was changed.
        """
        self._check_may_wait("a planned change")
        self.check_open()
        deadline = self._deadline(timeout)
        while True:
            with self.changed:
                if not any(
                    self.changed.wait_for(lambda: self.view.phase in _SETTLED, seconds)
                    for seconds in wait_periods(self._left(deadline))
                ):
                    msg = f"the group is not whole after {timeout:g} s; nothing was changed"
                    raise TimeoutError(msg)
            self.check_open()
            if before is not None:
                before(deadline)
            try:
                if not force and not self.plane.pause(deadline):
                    msg = f"calls are still in flight after {timeout:g} s; nothing was changed"
                    raise TimeoutError(msg)
                if not force and self.checkpoints is not None and self.checkpoints.is_unsaved():
                    try:
                        self.save(self._left(deadline), under_hold=True)
                    except CallTimeout as error:
                        msg = f"the state is not stored after {timeout:g} s; nothing was changed"
                        raise TimeoutError(msg) from error
                plan = make()
                if plan is not None:
                    self.tell(plan)
                    self._wait_done(plan, timeout, deadline)
            finally:
                self.plane.resume()
            if plan is not None and plan.accepted:
                return
            self.check_open()

    def _wait_done(
        self, plan: PlannedChange, timeout: float | None, deadline: float | None
    ) -> None:
        while not plan.done.wait(max(0.01, min(1.0, self._left(deadline, 1.0)))):
            if self.gone.is_set():
                return
            if plan.accepted and deadline is not None and self.clock() >= deadline:
                msg = f"the change is under way, not done after {timeout:g} s; it goes on"
                raise TimeoutError(msg)

    def forgive_restarts(self, count: int) -> None:
        """See `Executor.forgive_restarts`."""
        self.post(self.actor.forgive, check_count("count", count, least=0))

    def drain(self, timeout: float | None) -> None:
        """See `Executor.drain`."""
        self._check_may_wait("drain")
        self.check_open()
        try:
            if not self.plane.pause(self._deadline(timeout), every_call=True):
                msg = f"calls are still without an outcome after {timeout:g} s"
                raise TimeoutError(msg)
        finally:
            self.plane.resume()

    # --- ending -------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.closing or self.view.phase in (Phase.CLOSING, Phase.ENDED)

    def close(self, *, drains: bool = False) -> None:
        """Stop everything, and wait for it; accepted calls get their time first if it *drains*.

        From one of the executor's own threads it only requests the end; also from a finalizer
        or signal handler that has interrupted what others need meanwhile.
        """
        if self._pid != os.getpid():
            return
        mine = self.callbacks.is_current() or self.plane.is_inside(waits=True) or is_holding()
        if drains and not mine and not self.gone.is_set():
            self.heartbeats.tell_draining()
            self._refuse()
            limit = self.clock() + self.spec.limits.stop.drain
            try:
                if self.plane.pause(limit, every_call=True):
                    self.plane.stay_paused()
            finally:
                self.plane.resume()
        self.request_close()
        if mine:
            return
        try:
            self._await_end()
        except KeyboardInterrupt:  # a second Ctrl-C hurries
            self.kill()
            self._await_end()
            raise
        finally:
            open_executors.release_signals()

    def _await_end(self) -> None:
        """Wait until everything has been given back, and log what that waits for."""
        stop = self.spec.limits.stop
        if wait_event(self.gone, _QUIET):
            return
        doing = {info.rank: info.doing for info in self.ranks() if info.doing}
        if doing:
            self.log.warning("phalanx.close_waits", doing=doing, seconds=stop.ask)
        limit = stop.ask + stop.terminate + _TEARDOWN
        if not wait_event(self.gone, limit):
            self.log.error("phalanx.end_overdue", seconds=limit)

    def wait_closed(self, timeout: float | None) -> ExitReason | None:
        """Wait until everything has been given back; return why it ended, None at the timeout."""
        limit = None if timeout is None else check_seconds("timeout", timeout)
        self.check_process()
        self._check_may_wait("wait_closed")
        wait_event(self.gone, limit)
        return self.exit_reason

    def request_close(self) -> None:
        """Request the end, once; returns at once. Does nothing in a forked child, like `kill`."""
        if self._pid != os.getpid():  # a thread that was not copied may have the locks
            return
        if is_holding():  # a finalizer, in the middle of something
            if not self.gone.is_set():  # else there may be no event loop
                self.runtime.loop.post(self.request_close)
            return
        with self._lock:
            if not self.closing:
                self.closing = True
                self._refuse()
                self.post(self.actor.close)

    def kill(self) -> None:
        """Kill every rank and have the group end; returns at once."""
        if self._pid != os.getpid():
            return
        if is_holding():  # as above
            if not self.gone.is_set():
                self.runtime.loop.post(self.kill)
            return
        self.request_close()
        self.post(self.actor.kill_all)

    def _refuse(self) -> None:
        message = f"executor {self.spec.name} was closed; build a new one"
        self.plane.refuse(lambda: ExecutorClosed(message, sent=False))

    def _deadline(self, timeout: float | None) -> float | None:
        return None if timeout is None else self.clock() + check_seconds("timeout", timeout)

    def _left(self, deadline: float | None, otherwise: Any = None) -> Any:
        """Return the seconds until *deadline*; *otherwise* if there is none."""
        return otherwise if deadline is None else max(0.0, deadline - self.clock())


def _with_progress(info: RankInfo, now: Progress) -> RankInfo:
    return replace(
        info,
        served=now.served,
        owed=now.owed,
        method=now.method,
        running_for=now.running or 0.0,
        abandoned=now.abandoned,
    )
