"""The worker side: builds the user's object, runs its hooks and calls, stores and restores state.

- The object is built and started once per incarnation, and leaves its process group at the stop.
- Exceptions of hooks are logged; they do not hide the reason of the stop.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors.spec.context import WorkerContext
from phalanx.actors.spec.factory import load_factory
from phalanx.actors.spec.worker import WorkerActor, name_of
from phalanx.runtime import (
    Frame,
    Kind,
    LargeFrame,
    ProgressPage,
    RemoteFailure,
    ServerSpan,
    Stamp,
    Telemetry,
    WorkerLabels,
    abort_process_groups,
    await_assignment,
    encode,
    free_groups,
    leave_process_groups,
    load_snapshot,
    outside,
    place_on,
    store_snapshot,
    within,
    worker_logger,
)
from phalanx.supervision import RESUME_UNLESS_BROKEN, Directive, RuntimeFault, UnknownMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.actors.observe.hooks import WorkerProbe
    from phalanx.actors.spec.layout import Layout
    from phalanx.runtime import Link, Payload, Rendezvous
    from phalanx.supervision import Decider, ExitReason


_MANY_MODULES = 100  # imported in a start: some tenths of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The parameters of one incarnation; pickled by name.

    Attributes:
        factory: The pickled (class, args, kwargs), by value if they have no importable name;
            empty for a spare, which has it already.
        keywords: The pickled keyword arguments of this rank alone.
        probe: The pickled `WorkerProbe`; empty for none.
        decider: The user's pickled decider; empty for the default.
        trace: The context of the span of this start; empty for none.
        saving: The number of a snapshot less that of its call, and the folder it is stored in,
            empty for memory, whose descriptor the driver gets; None where no state is stored.
        restoring: The (start, size) of the rank's own state, or of all ranks' for `reshard`, in the
            file that follows on the control socket; empty for none.
        reshards: Whether those are the states of another number of ranks.
        machines: How many the group is on.
    """

    factory: bytes
    keywords: bytes
    labels: WorkerLabels
    layout: Layout
    devices: tuple[str, ...]
    rendezvous: Rendezvous | None
    probe: bytes = b""
    decider: bytes = b""
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    saving: tuple[int, str] | None = None
    restoring: tuple[tuple[int, int], ...] = ()
    reshards: bool = False
    local_rank: int = 0
    machines: int = 1

    def context(
        self, rank: int, epoch: int, incarnation: int, log: Any, lock_file: int, **link: Any
    ) -> WorkerContext:
        """Return what the user's object is given; *link* is what connects it to its driver."""
        return WorkerContext(
            group=self.labels.group,
            rank=rank,
            local_rank=self.local_rank,
            world_size=self.layout.world_size,
            layout=self.layout,
            coordinates=self.layout.coordinates(rank) if self.labels.coordinates else {},
            devices=self.devices,
            epoch=epoch,
            incarnation=incarnation,
            rendezvous=self.rendezvous,
            log=log,
            _lock_file=lock_file,
            _machines=self.machines,
            **link,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform:
    """The next epoch, for a survivor; pickled by name.

    Attributes:
        env: The environment variables that have changed.
    """

    epoch: int
    rendezvous: Rendezvous | None
    env: Mapping[str, str]


class WorkerFactory:
    """The user's class and arguments: unpickled once, which imports their modules."""

    def __init__(self, factory: bytes) -> None:
        self._cls, self._args, self._kwargs = load_factory(factory)
        self._made: WorkerActor | None = None

    def prepare(self) -> None:
        """Build the object now and run `on_standby`, if its class has that hook."""
        if self._cls.on_standby is not WorkerActor.on_standby:
            made: WorkerActor = self._cls(*self._args, **self._kwargs)
            _run_hook("on_standby", made.on_standby)
            self._made = made

    def build(self, keywords: bytes) -> WorkerActor:
        """Return the object."""
        if self._made is not None:
            return self._made
        made: WorkerActor = self._cls(*self._args, **{**self._kwargs, **pickle.loads(keywords)})
        return made


class WorkerHost:
    """Builds, starts, calls and stops one `WorkerActor`."""

    def __init__(
        self,
        config: WorkerConfig,
        context: WorkerContext,
        factory: WorkerFactory | None = None,
        link: Link | None = None,
    ) -> None:
        self._config = config
        self._link = link
        self._original = b"\1" if link is None else link.original
        self._context = context
        self._factory = factory
        self._actor: WorkerActor | None = None
        self._decider: Decider | None = None
        self._probe: WorkerProbe | None = None
        self._telemetry = Telemetry()
        if config.probe and link is not None:
            self._probe = pickle.loads(config.probe)
            self._page = ProgressPage(link.fds["page"])

    @property
    def after_reply(self) -> Callable[[], None] | None:
        """Called when a call has been answered; None without a probe."""
        return None if self._probe is None else self._probe.after_reply

    def start(self) -> None:
        """Build the user's object and run `on_start`."""
        token = within(self._config.trace)
        try:
            known = set(sys.modules)
            factory = self._factory or WorkerFactory(self._config.factory)
            self._actor = factory.build(self._config.keywords)
            self._start(self._actor, known)
        finally:
            self.end_copy()
            outside(token)

    def _start(self, actor: WorkerActor, known: set[str]) -> None:
        actor.ctx = self._context
        try:
            if self._probe is not None:
                self._probe.woke(self._context, kept=False)
            _run_hook("on_start", actor.on_start, self._context)
            self._report_imports(set(sys.modules) - known)
            if self._config.restoring:
                self._restore(actor)
        except Exception as error:
            self.end_copy()
            self.fail(error)
            raise

    def _report_imports(self, new: set[str]) -> None:
        """Log what the first start of rank 0 has imported, if every start will take long for it."""
        if len(new) < _MANY_MODULES or (self._context.rank, self._context.incarnation) != (0, 1):
            return
        below = Counter(_root(name, new) for name in new)
        self._context.log.warning(
            "phalanx.start_imports",
            modules=len(new),
            most=", ".join(f"{root} ({count})" for root, count in below.most_common(5)),
            remedy="each start imports these again; name them in preload=",
        )

    def _restore(self, actor: WorkerActor) -> None:
        assert self._link is not None
        frame = self._link.receive()
        if not isinstance(frame, LargeFrame) or frame.kind != Kind.RESTORE or not frame.fds:
            msg = "the control socket did not carry the state to restore"
            if isinstance(frame, Frame) and frame.kind == Kind.RESTORE:
                msg = f"the state to restore was lost: {RemoteFailure.read(frame).message}"
            raise RuntimeFault(msg)
        self._link.tell(Kind.RESTORING)
        try:
            states = [load_snapshot(frame.fds[0], *span) for span in self._config.restoring]
        finally:
            frame.drop()
        if self._config.reshards:
            _run_hook("reshard", actor.reshard, states)
        else:
            _run_hook("restore", actor.restore, states.pop())

    def save(self, call_id: int) -> Payload:
        """Store what `checkpoint` returns; return the message for the driver."""
        assert self._config.saving is not None
        assert self._actor is not None
        base, folder = self._config.saving
        try:
            made = _run_hook("checkpoint", self._actor.checkpoint)
            state = encode(made, "what checkpoint() returned")
            if self._link is not None:
                self._link.check_results()
        finally:
            self.end_copy()
        stamp = Stamp(
            number=base + call_id,
            rank=self._context.rank,
            world_size=self._context.world_size,
            incarnation=self._context.incarnation,
            at=time.time(),
        )
        return store_snapshot(state, stamp, Path(folder) if folder else None)

    def invoke(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call: a method by name, or a callable that gets the actor first."""
        try:
            if self._probe is not None:
                return self._probe.invoke(self._run, method, args, kwargs, self._page.begun)
            return self._run(method, args, kwargs)
        finally:
            if not self._original[0]:
                self.end_copy()

    def end_copy(self) -> None:
        """End this process if it is a forked copy of the worker that has left the user's code.

        Only the process that was started may answer, store state or run further hooks. The copy
        ends without clean-up, as children of `multiprocessing` do.
        """
        if self._original[0]:
            return
        error = sys.exception()
        code = int(error is not None)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        try:
            self._context.log.warning("phalanx.forked_copy_ended", exit_code=code, exc_info=error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)

    def _run(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(method, str):
            return method(self._actor, *args, **kwargs)
        function = getattr(self._actor, method, None)
        if function is None:
            msg = f"{type(self._actor).__qualname__} has no method {method!r}"
            raise UnknownMethod(msg)
        return function(*args, **kwargs)

    def span(self, method: Any, carrier: Mapping[str, str]) -> ServerSpan:
        """Begin the span of a call of *method*, whose caller *carrier* names."""
        context = self._context
        name = name_of(method)
        service = type(self._actor).__name__
        about = {
            "rpc.system": "phalanx",
            "rpc.service": service,
            "rpc.method": name,
            "phalanx.group": context.group,
            "phalanx.rank": context.rank,
            "phalanx.epoch": context.epoch,
            "phalanx.incarnation": context.incarnation,
            "phalanx.method": name,
        }
        return ServerSpan(self._telemetry, f"{service}/{name}", about, carrier)

    def adopt(self, epoch: int) -> None:
        """Note the group's new epoch."""
        self._context.epoch = epoch

    def reform(self, order: Reform) -> None:
        """Leave the old process group, then run `on_reform`."""
        context = self._context
        context.epoch = order.epoch
        context.rendezvous = order.rendezvous
        context.log = context.log.bind(epoch=order.epoch)
        os.environ.update(order.env)
        left = abort_process_groups()
        leave_process_groups()
        assert self._actor is not None
        if self._link is not None:
            self._link.tell(Kind.LEFT)
        if self._probe is not None:
            self._probe.woke(context, kept=True)
        try:
            _run_hook("on_reform", self._actor.on_reform, context)
        finally:
            self.end_copy()
            free_groups(left)  # after the hook has dropped its references to them

    def stop(self, reason: ExitReason) -> None:
        """Run `on_stop`, then leave the process group."""
        try:
            if self._actor is not None:
                _run_hook("on_stop", self._actor.on_stop, reason)
        except BaseException:  # SystemExit too: logged; the worker stops anyway
            self._context.log.exception("phalanx.on_stop_failed")
        self.end_copy()
        self.leave()

    def leave(self) -> None:
        """Leave the process group. If it is inline, one that it has not joined is the program's."""
        context: Any = self._context
        if self._link is not None or context._has_joined:  # noqa: SLF001  # of no use to users
            context._has_joined = False  # noqa: SLF001  # likewise
            leave_process_groups()

    def judge(self, error: BaseException) -> Directive:
        """Return the decider's directive for an error of a method; *resume* if it has none."""
        if self._decider is None:
            own = self._config.decider
            self._decider = cast("Decider", pickle.loads(own)) if own else RESUME_UNLESS_BROKEN

        def failed(raised: BaseException) -> None:
            self._context.log.error("phalanx.callback_failed", callback="decider", exc_info=raised)

        directive = self._decider.directive(error, str(self._context.rank), failed=failed)
        return Directive.RESUME if directive is None else directive

    def note_foreign_packet(self) -> None:
        """Log a packet on the call socket that is no message; the worker goes on."""
        self._context.log.warning("phalanx.foreign_packet", on="worker")

    def fail(self, error: BaseException) -> None:
        """Run `on_failure`."""
        try:
            if self._actor is not None:
                _run_hook("on_failure", self._actor.on_failure, error)
        except BaseException:  # SystemExit too: logged; *error* is what counts
            self._context.log.exception("phalanx.on_failure_failed")
        self.end_copy()


def _run_hook(name: str, hook: Callable[..., object], *args: object) -> object:
    """Run *hook*; raise TypeError if that has only made something to be awaited or iterated."""
    made = hook(*args)
    kind = type(made).__name__
    if isinstance(made, Awaitable | Generator | AsyncGenerator):
        if isinstance(made, Coroutine | Generator):
            made.close()
        msg = f"{name} returned a {kind}; a worker's hooks are plain methods"
        raise TypeError(msg)
    return made


def _root(name: str, new: set[str]) -> str:
    """Return the outermost package of module *name* that is in *new*."""
    while (parent := name.rpartition(".")[0]) in new:
        name = parent
    return name


def host_spare(factory: bytes, link: Link) -> WorkerHost:
    """Prepare the object of *factory*, wait for the assignment of a rank; return its host."""
    made = WorkerFactory(factory)
    try:
        made.prepare()
    finally:
        if not link.original[0]:
            os._exit(1)  # a copy that `on_standby` has forked
    return host_worker(await_assignment(link).blob, link, made)


def host_worker(blob: bytes, link: Link, factory: WorkerFactory | None = None) -> WorkerHost:
    """Return the host for the `WorkerConfig` in *blob*."""
    config: WorkerConfig = pickle.loads(blob)
    if factory is not None:
        _check_unstarted(config.devices)
    place_on(config.devices[0])
    log, locks = worker_logger(link.fds["log"], config.labels), link.fds["locks"]
    context = config.context(link.rank, link.epoch, link.incarnation, log, locks, _link=link)
    return WorkerHost(config, context, factory, link)


def _check_unstarted(devices: tuple[str, ...]) -> None:
    """Raise if CUDA was started before this process had its device: it would use another."""
    cuda = sys.modules.get("torch.cuda")
    if devices[0] != "cpu" and cuda is not None and cuda.is_initialized():
        msg = (
            "on_standby, or an import, has started CUDA; a device comes with the rank: use on_start"
        )
        raise RuntimeFault(msg)
