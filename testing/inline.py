"""``launch="inline"``: an executor whose one rank runs in the caller's own thread, for debuggers.

Arguments and results are encoded and decoded as between processes, and errors look the same. There
is no process: no deaths, limits or retries, and an exception of the start is raised as it is.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from phalanx.actors.calls.call import Shape, check_timeout, options_of
from phalanx.actors.calls.streams import ReplyStream
from phalanx.actors.spec.factory import unpicklable_argument
from phalanx.actors.spec.results import Emitted, Outcome, OutcomeKind, Status
from phalanx.actors.spec.worker import Methods
from phalanx.actors.worker_side.user_object import WorkerConfig, WorkerHost
from phalanx.runtime import (
    AsyncOutput,
    DevicePool,
    RankInfo,
    Request,
    WorkerLabels,
    close_lock_file,
    create_lock_file,
    decode,
    encode,
)
from phalanx.supervision import (
    SHUTDOWN,
    ExecutorClosed,
    NotPicklable,
    Phase,
    check_count,
    check_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from phalanx.actors.calls.call import OnTimeout
    from phalanx.actors.calls.streams import StreamInbox
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.supervision import ExitReason


class InlineGroup:
    """The group of an executor, in the caller's thread; its methods are those of `Group`."""

    is_failed = False

    def __init__(self, spec: ExecutorSpec) -> None:
        self._spec, self.methods = spec, Methods(spec.worker)
        self.log = structlog.get_logger(group=spec.name)
        self._listeners: list[Callable[[Any], None]] = []
        self._closed = False
        self._turn = threading.RLock()  # a method may call its own executor
        labels = WorkerLabels(
            child=f"{spec.name}/0", group=spec.name, rank=0, epoch=1, pid=os.getpid(), device="cpu"
        )
        share = spec.devices.per_rank
        with ExitStack() as made:
            self._pool = DevicePool.of(spec.devices.names, 1, devices_per_rank=share)
            made.callback(self._pool.close)
            [self._lease] = self._pool.acquire([Request(0, f"{spec.name}/0")], share)
            made.callback(self._pool.give_back, self._lease, os.getpid())
            lock_file = create_lock_file()
            made.callback(close_lock_file, lock_file)
            config = WorkerConfig(
                factory=spec.factory,
                keywords=spec.keywords[0],
                labels=labels,
                layout=spec.layout,
                devices=self._lease.places,  # what this process sees is not for a lease to change
                rendezvous=None,
            )
            # The driver's own logger: this worker is the driver.
            log = structlog.get_logger().bind(group=spec.name, rank=0, incarnation=1, epoch=1)
            context = config.context(0, 1, 1, log, lock_file, _listener=self._emitted)
            self._host = WorkerHost(config, context)
            made.callback(self._host.leave)
            self._host.start()
            self._made = made.pop_all()

    def call(
        self,
        shape: Shape,
        method: str | Callable[..., Any],
        each: list[tuple[tuple[Any, ...], Mapping[str, Any]]],
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
        at_once: bool = True,
    ) -> Any:
        """Run a call here and now, and return its value, its future or its stream."""
        del size, of_output, at_once  # there is one rank, and nothing waits for its turn
        if timeout is not None:
            check_timeout(timeout)
        name, _ = self.methods.declared_of(method, each)
        options_of(now=0.0, timeout=timeout, retries=retries or 0, on_timeout=on_timeout, tell=tell)
        self.check_open()
        if stream is not None:
            items = self._stream(name, method, *each[0])
            next(items)
            return InlineStream(items if rank is not None else ((0, item) for item in items))
        future = InlineFuture()
        try:
            value = self._run(name, method, *each[0])
            if shape is Shape.GATHER:
                value = [Outcome(0, OutcomeKind.OK, value)]
            elif shape is Shape.COLLECTIVE and aggregate is not None:
                value = aggregate([value], lead)
            elif shape is Shape.COLLECTIVE and want is None:
                value = [value]
        except Exception as error:  # noqa: BLE001  # settled below, as from a process
            if shape is Shape.GATHER:
                future.set_result([Outcome(0, OutcomeKind.ERROR, error=error)])
            else:
                future.set_exception(error)
        else:
            future.set_result(value)
        return future if non_block else future.result()

    def has_room(self) -> bool:
        """Return True: a call never waits for a place."""
        return True

    def when_room(self, _wake: Callable[[], None]) -> None:
        """Return None, as `has_room` is always True."""

    @property
    def exit_reason(self) -> ExitReason | None:
        """Why it has ended."""
        return SHUTDOWN if self._closed else None

    def wait_closed(self, timeout: float | None) -> ExitReason | None:  # noqa: ARG002  # `Group`'s
        """Return at once: only its caller could close it meanwhile."""
        return self.exit_reason

    @property
    def view(self) -> Status:
        """Its status."""
        state, phase = ("down", Phase.ENDED) if self._closed else ("up", Phase.SERVING)
        info = RankInfo(0, os.getpid(), 1, 1, state, str(self._lease))
        what: dict[str, Any] = {"name": self._spec.name, "layout": self._spec.layout, "epoch": 1}
        return Status(phase=phase, ranks=(info,), devices=self._pool.status(), **what)

    def ranks(self) -> tuple[RankInfo, ...]:
        """Return its one rank."""
        return self.view.ranks

    def status(self) -> Status:
        """Return how the executor is doing."""
        return self.view

    def check_health(self, timeout: float) -> None:
        """Return at once: its main loop is the caller."""
        check_seconds("timeout", timeout)
        self.check_open()

    def when_failed(self, callback: Callable[[ExitReason], None]) -> None:
        """Forget *callback*: it never comes to that."""

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Hand what the worker emits to *callback*, in the caller's thread."""
        listener = partial(callback)  # unlike *callback*, equal to no other
        self._listeners.append(listener)

        def leave() -> None:
            with suppress(ValueError):
                self._listeners.remove(listener)

        return leave

    def check_open(self) -> None:
        """Raise `ExecutorClosed` where it takes no calls."""
        if self._closed:
            raise ExecutorClosed(f"executor {self._spec.name} was closed; build a new one")

    def change(self, *_: object, **__: object) -> None:
        """Change nothing: there is one rank, in no process of its own, and nothing is in flight."""
        self.check_open()

    resize = drain = change

    def forgive_restarts(self, count: int) -> None:
        """There are none."""
        check_count("count", count, least=0)
        self.check_open()

    def close(self) -> None:
        """End it."""
        if not self._closed:
            self._closed = True
            with self._made:
                self._host.stop(SHUTDOWN)

    request_close = kill = close

    def _emitted(self, rank: int, value: Any) -> None:
        value = _travel(value, "an emitted value")
        event = Emitted(self._spec.name, rank, 1, 1, value, time.monotonic())
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:  # noqa: BLE001  # its worker has no part in it
                about = {"callback": repr(listener), "trace": traceback.format_exc()}
                self.log.error("phalanx.callback_failed", **about)  # noqa: TRY400

    def _run(self, name: str, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with _arrived(name, method, args, kwargs) as arrived, self._turn:
            value = self._host.invoke(*arrived)
            if isinstance(value, AsyncOutput):
                value = value.get_output()
        return _travel(value, f"the reply of {name}")

    def _stream(
        self, name: str, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Generator[Any]:
        """Yield None once the method was called, then its items."""
        with _arrived(name, method, args, kwargs) as arrived:
            begun = Future[Any]()  # what the method raises is for who takes the items
            try:
                with self._turn:
                    begun.set_result(iter(self._host.invoke(*arrived)))
            except Exception as error:  # noqa: BLE001
                begun.set_exception(error)
            yield
            items = begun.result()
            while True:
                self.check_open()
                with self._turn:
                    item = next(items, _END)
                if item is _END:
                    return
                yield _travel(item, f"an item of {name}")


class InlineFuture(Future[Any]):
    """The future of a call that has run: what a `CallFuture` has beyond the base class."""

    @property
    def failed_rank(self) -> int | None:
        """The one rank if it has raised."""
        return None if self.exception() is None else 0

    def abandon(self) -> bool:
        """Return False: the call is done."""
        return False

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result()
        yield  # what makes this a generator


class InlineStream(ReplyStream):
    """A stream of the rank in the caller's own process."""

    def __init__(self, items: Generator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)

    async def __anext__(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Close the generator."""
        self._items.close()

    def __del__(self) -> None:
        """Leave the generator to its own finalizer."""


_END = object()
Called = tuple[Any, tuple[Any, ...], "Mapping[str, Any]"]


@contextmanager
def _arrived(name: str, *call: *Called) -> Generator[Called]:
    """Yield the method and arguments of a *call* as a worker has them; note its exception alike."""
    try:
        arrived: Called = _travel(call, f"the arguments of {name}")
    except NotPicklable as error:
        raise unpicklable_argument(name, *call[1:], error) from error.__cause__
    try:
        yield arrived
    except Exception as error:
        with suppress(Exception):  # an exception type may refuse further attributes
            error.add_note(f"raised by rank 0 in {name} (inline)")
        raise


def _travel(value: Any, what: str) -> Any:
    encoded = encode(value, what)
    return decode(encoded.body, [memoryview(bytearray(view)) for view in encoded.buffers])
