"""Handle of a rank group: what outlives the user's `Executor` object.

What stays of an executor when its handle is forgotten: enough to end it.

Guarantees: ending is idempotent and may come from several threads at once, from a callback, from
the garbage collector or from the end of the program; whoever may wait returns once everything has
been given back.

What an executor's actor shares with its users' threads.

Guarantees: what changes is changed under `changed`, whose waiters are told; whoever registers for
the end of the group hears of it once, also where it registers too late.

Left to others: when a group is ready, and when it has ended (`executor_actor`).

An executor's place in a supervision tree.

Guarantees: nothing of it holds on to the executor, so a place outlives those that follow each other
in it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pykka

from phalanx.actors.calls.callbacks import Callbacks
from phalanx.actors.calls.plane import Plane
from phalanx.actors.checkpoint.coordinator import cuts_of
from phalanx.actors.health.heartbeat import Pulses
from phalanx.actors.health.monitor import HangWatch
from phalanx.actors.observe.feed import glance_of
from phalanx.actors.observe.hooks import current_probe
from phalanx.actors.observe.tracing import GroupTrace
from phalanx.actors.remote.links import PRELOAD
from phalanx.actors.signals.process_exit import living
from phalanx.actors.spec.results import GroupView
from phalanx.actors.spec.validate import too_few_descriptors
from phalanx.runtime import (
    ReentrantLock,
    acquire_shared,
    check_machine,
    descriptor_limit,
    is_holding,
    release_shared,
)
from phalanx.supervision import SHUTDOWN, ExecutorClosed, Phase, SpecError

from .actor import ExecutorActor
from .messages import Close, KillAll, OutOfStep, Started, StreamEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from phalanx.actors.calls.call import Call
    from phalanx.actors.checkpoint.coordinator import Cuts
    from phalanx.actors.observe.hooks import GroupProbe, Probe
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import DeviceStatus, Runtime
    from phalanx.supervision import ExitReason, SupervisorSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What an executor has of the supervisor it is a child of.

    Attributes:
        on_end: Told why the group has ended, once, whatever the cause.
        on_use: Told when a rank has served a call, at the rank's end at the latest.
        emit_by: Given what logs events, for those of the tree.
        look: Returns what the tree looks like.
        cuts: What keeps the states of the ranks beyond one executor; None where none are kept.
    """

    on_end: Callable[[ExitReason], None]
    on_use: Callable[[], None]
    emit_by: Callable[[Callable[[Any], object]], None]
    look: Callable[[], SupervisorSnapshot]
    cuts: Cuts | None


@dataclass(slots=True)
class Shared:
    """What an executor's actor shares with its users' threads.

    Attributes:
        ready: Set once the group has served for the first time, or has ended.
        gone: Set once everything has been given back.
        start_error: Why the group never came up.
        owns_cuts: Whether *cuts* end with the executor.
        cause: Why the group ended by itself; None where it was closed or lives.
        devices: Returns how the devices are.
        probe: What looks on, where faults are injected.
    """

    plane: Plane
    callbacks: Callbacks
    watch: HangWatch
    trace: GroupTrace
    pulses: Pulses
    view: GroupView
    changed: threading.Condition
    cuts: Cuts | None = None
    owns_cuts: bool = True
    ready: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    start_error: BaseException | None = None
    cause: ExitReason | None = None
    closing: bool = False
    devices: Callable[[], tuple[DeviceStatus, ...]] = tuple
    probe: GroupProbe | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _listeners: dict[int, Callable[[Any], None]] = field(
        default_factory=dict[int, "Callable[[Any], None]"]
    )
    _when_failed: list[Callable[[ExitReason], None]] = field(
        default_factory=list["Callable[[ExitReason], None]"]
    )

    def show(self, view: GroupView) -> None:
        """Have *view* be what the group looks like now."""
        with self.changed:
            self.view = view
            self.changed.notify_all()

    def listen(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        """Hand every event to *listener* from now on; return what ends that."""
        with self.changed:
            number = next(self._numbers)
            self._listeners[number] = listener

        def leave() -> None:
            with self.changed:
                self._listeners.pop(number, None)

        return leave

    def deliver(self, event: Any) -> None:
        """Hand *event* to the listeners, on the thread of the callbacks."""
        with self.changed:
            listeners = list(self._listeners.values())
        for listener in listeners:
            self.callbacks.run(listener, event)

    def when_failed(self, callback: Callable[[ExitReason], None]) -> None:
        """Run *callback* once the group has ended by itself; at once where it has."""
        with self.changed:
            if self.cause is None:
                self._when_failed.append(callback)
                return
        self.callbacks.run(callback, self.cause)

    def tell_failed(self, reason: ExitReason) -> None:
        """Run what was to be run once the group has ended by itself."""
        with self.changed:
            callbacks, self._when_failed = self._when_failed, []
        for callback in callbacks:
            self.callbacks.run(callback, reason)


_QUIET = 0.5  # seconds of a close before the log says what it waits for
_TEARDOWN = 30.0  # seconds beyond the stop policy for trees, devices and shared parts to go


class Core:
    """One executor's actor, and the way to end it.

    Args:
        runtime: The shared parts to use; None takes this process's own.
        named: The name its user gave, which no other may have; None for none.
        replace: Whether an executor that has that name is ended first.
        place: Where it is in a tree; None where it stands alone.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        runtime: Runtime | None,
        named: str | None,
        place: Place | None = None,
        *,
        replace: bool = False,
    ) -> None:
        probe = current_probe()
        self.spec = spec if probe is None else probe.adjust(spec)
        self._pid = os.getpid()
        self._lock = ReentrantLock()  # `request_end` does it once, and may be called within
        try:
            self._before = None if named is None else living.claim(named, self, replace=replace)
            self._build(runtime, place, probe)
        except BaseException:
            living.remove(self)
            raise
        # Only now: from here on anybody may end it, and there is something to end.
        living.add(self)

    def _build(self, runtime: Runtime | None, place: Place | None, probe: Probe | None) -> None:
        spec = self.spec
        self._room = descriptor_limit.Reservation()
        check_machine()
        self._reserve(spec.world_size, serving=0)
        release = ExitStack()
        release.callback(self._room.set, 0)
        try:
            self.runtime = acquire_shared() if runtime is None else runtime
            if runtime is None:
                release.callback(release_shared, self.runtime)
            # Boots while the rest is being made.
            self.runtime.launcher(spec.preload).warm()
            if spec.transport is not None:
                self.runtime.launcher(PRELOAD).warm()
            if place is not None:
                place.emit_by(self.runtime.scribe.emit)
            self.shared = self._share(None if place is None else place.cuts)
            if probe is not None:
                self.shared.probe = probe.attach(spec, self.shared)
            self.ref: pykka.ActorRef[ExecutorActor] = ExecutorActor.start(
                spec,
                self.runtime,
                self.shared,
                self._ended(release.close),
                place,
            )
        except BaseException as error:
            shared: Shared | None = getattr(self, "shared", None)
            if shared is not None and not shared.gone.is_set():
                shared.watch.close()
                shared.plane.close()
            release.close()
            if descriptor_limit.is_shortage(error):
                raise too_few_descriptors(error) from error
            raise
        look = None if place is None else place.look
        self._unshow = self.runtime.glances.add(partial(glance_of, spec, self.shared, look))

    def start(self) -> None:
        """Have its ranks started, once what had its name has ended."""
        before, self._before = self._before, None
        if before is not None:
            if not before.is_ending:
                self.runtime.scribe.log.warning("phalanx.executor_replaced", group=self.spec.name)
            before.end(drains=False)
        self.tell(Started())

    @property
    def is_ending(self) -> bool:
        """Whether it has ended, or is about to."""
        shared: Shared | None = getattr(self, "shared", None)  # None while it is being built
        if shared is None:
            return False
        return shared.closing or shared.view.phase in (Phase.CLOSING, Phase.ENDED)

    def tell(self, notice: object) -> None:
        """Tell the actor something; void once it has ended."""
        with suppress(pykka.ActorDeadError):
            self.ref.tell(notice)

    def wait_ready(self) -> None:
        """Return once the group has served for the first time; raise why it did not."""
        # No deadline of its own: each start has one, and so has the stop that follows a failed one.
        self.shared.ready.wait()
        if self.shared.closing:
            living.stay_until_the_end()
        view = self.shared.view
        if view.phase in (Phase.CLOSING, Phase.ENDED) and self.shared.start_error is not None:
            self.shared.gone.wait(_TEARDOWN)
            raise self.shared.start_error
        if self.shared.closing:
            msg = f"executor {self.spec.name} was closed during its start"
            raise ExecutorClosed(msg)

    def reserve(self, world_size: int) -> None:
        """Set descriptors aside for *world_size* ranks, some of which may have theirs.

        Raises:
            SpecError: there are too few.
        """
        self._reserve(world_size, serving=len(self.shared.view.ranks) + self.spec.standby)

    def check_process(self) -> None:
        """Raise unless this is the process that built the executor."""
        if self._pid != os.getpid():
            msg = (
                f"executor {self.spec.name} belongs to the parent process: build one after forking"
            )
            raise ExecutorClosed(msg)

    def end(self, *, drains: bool = False) -> None:
        """Stop everything, and wait for it; accepted calls get their time first if it *drains*.

        From one of the executor's own threads it only asks for the end; so it does from a finalizer
        or signal handler that has interrupted what others need meanwhile.
        """
        if self._pid != os.getpid():
            return
        shared = self.shared
        mine = shared.callbacks.is_current() or shared.plane.is_inside(waits=True) or is_holding()
        if drains and not mine and not shared.gone.is_set():
            shared.pulses.tell_draining()
            self._refuse()
            limit = time.monotonic() + self.spec.stop.drain
            holding = shared.plane.holding
            try:
                if holding.wait_idle(limit, every_call=True):
                    holding.leave_idle()
            finally:
                holding.resume()
        self.request_end()
        if mine:
            return
        try:
            self._await_end()
        except KeyboardInterrupt:  # whoever waits is in a hurry
            self.kill()
            self._await_end()
            raise
        finally:
            living.release_signals()

    def _await_end(self) -> None:
        """Wait until everything has been given back, and log what that waits for."""
        shared, stop = self.shared, self.spec.stop
        if shared.gone.wait(_QUIET):
            return
        log = self._log
        seated = shared.plane.seated()
        doing = {rank: each.doing for rank, each in sorted(seated.items()) if each.doing}
        if doing:
            log.warning("phalanx.close_waits", group=self.spec.name, doing=doing, seconds=stop.ask)
        limit = stop.ask + stop.terminate + _TEARDOWN
        if not shared.gone.wait(limit):
            log.error("phalanx.end_overdue", group=self.spec.name, seconds=limit)

    def request_end(self) -> None:
        """Ask for the end, once; returns at once."""
        if is_holding():  # a finalizer, in the middle of something
            self.runtime.hub.post(self.request_end)
            return
        with self._lock:
            if not self.shared.closing:
                self.shared.closing = True
                self._refuse()
                self.tell(Close(SHUTDOWN))

    def kill(self) -> None:
        """Ask for the end, with no time for anybody; returns at once."""
        if is_holding():  # as above
            self.runtime.hub.post(self.kill)
            return
        self.request_end()
        self.tell(KillAll())

    def _reserve(self, world_size: int, *, serving: int) -> None:
        free = descriptor_limit.free()
        if serving:
            free += descriptor_limit.FOR_ALL + serving * descriptor_limit.FOR_SERVING
        ranks = world_size + self.spec.standby
        linked = self.spec.transport is not None
        each = descriptor_limit.FOR_RANK + linked * descriptor_limit.FOR_LINK
        needed = descriptor_limit.FOR_ALL + ranks * each
        if needed > free:
            raise SpecError(
                "world_size",
                world_size,
                f"{needed} descriptors are needed, {self.spec.standby} spares included, and {free} "
                f"are free of the {descriptor_limit.hard_limit()} that this process may have: "
                f"enough for {descriptor_limit.ranks_that_fit(free, linked=linked)} ranks; "
                "raise the hard limit (`ulimit -Hn`, LimitNOFILE= of systemd, docker run --ulimit)",
            )
        self._room.set(needed)

    def _refuse(self) -> None:
        name = self.spec.name

        def closed() -> BaseException:
            return ExecutorClosed(f"executor {name} was closed; build a new one")

        self.shared.plane.refuse(closed)

    def _share(self, cuts: Cuts | None) -> Shared:
        """Return what the actor and its users' threads share."""
        owns_cuts = cuts is None
        if owns_cuts:
            cuts = cuts_of(self.spec)
        self._log = log = self.runtime.scribe.log

        def complain(error: BaseException) -> None:
            with suppress(Exception):
                log.error("phalanx.callback_failed", group=self.spec.name, exc_info=error)

        watch = HangWatch(self.runtime.hub, self.spec.stopped_after, self.tell)

        def foreign(rank: int) -> None:
            log.warning("phalanx.foreign_packet", group=self.spec.name, rank=rank, on="driver")

        def untaken(call: Call) -> None:
            assert call.stream is not None
            log.warning(
                "phalanx.stream_not_taken",
                group=self.spec.name,
                rank=call.rank,
                method=call.name,
                seconds=call.stream.take_within,
            )

        changed = ReentrantLock()
        plane = Plane(
            self.runtime.hub,
            self.spec.world_size,
            depth=self.spec.queue_depth,
            cuts=cuts,
            spinning=self.spec.spin,
            on_foreign=foreign,
            on_end=lambda rank, incarnation: self.tell(StreamEnded(rank, incarnation)),
            on_busy=watch.wake,
            on_untaken=untaken,
            on_split=lambda wire: self.tell(OutOfStep(wire)),
            inner=(changed.is_mine,),
        )
        trace = GroupTrace(self.spec.name, self.spec.worker.__name__)
        view = GroupView(layout=self.spec.layout)
        return Shared(
            plane,
            Callbacks(complain),
            watch,
            trace,
            Pulses(),
            view,
            threading.Condition(cast("Any", changed)),
            cuts,
            owns_cuts,
        )

    def _ended(self, release: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            living.remove(self)
            self._unshow()
            release()

        return ended
