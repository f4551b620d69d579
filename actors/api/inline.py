"""A group of one rank in the caller's own thread, for debuggers.

One rank in the caller's own thread and process, for debuggers and `breakpoint()`.

Guarantees: arguments and results travel through the same encoding as between processes, so what
works inline works in a worker; errors look the same. There is no process to kill and no
supervision: an exception of the start is raised as it is.

An executor's group whose one rank runs in the caller's own thread; see `InlineRank`.

Guarantees: what is refused between processes is refused here, in the same words.

Left to others: deaths, limits and retries, which need a process.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from phalanx.actors.calls.call import Shape, check_timeout, terms_of
from phalanx.actors.calls.streams import InlineStream
from phalanx.actors.group.messages import Emitted
from phalanx.actors.host.host import Seed, WorkerHost
from phalanx.actors.spec.context import WorkerContext
from phalanx.actors.spec.options import culprit
from phalanx.actors.spec.results import GroupView, Outcome, OutcomeKind, RankInfo, status_of
from phalanx.actors.spec.validate import check_seconds
from phalanx.runtime import (
    AsyncOutput,
    DevicePool,
    LockTable,
    WorkerLabels,
    decode,
    descriptors,
    encode,
)
from phalanx.supervision import SHUTDOWN, ExecutorClosed, NotPicklable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from phalanx.actors.calls.call import OnDeath, OnTimeout
    from phalanx.actors.calls.streams import Incoming
    from phalanx.actors.spec.checkpoint_policy import Checkpoint
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.actors.spec.results import Status
    from phalanx.actors.spec.worker import Methods
    from phalanx.runtime import DeviceStatus
    from phalanx.supervision import ExitReason


class InlineRank:
    """Rank 0 of 1, here and now."""

    def __init__(self, spec: ExecutorSpec, listener: Callable[[int, Any], None]) -> None:
        labels = WorkerLabels(
            child=f"{spec.name}/0", group=spec.name, rank=0, epoch=1, pid=os.getpid(), device="cpu"
        )
        pool = DevicePool.of(spec.devices, 1, devices_per_rank=spec.devices_per_rank)
        share = spec.devices_per_rank
        self._pool, self._lease = pool, pool.acquire(0, share=share, holder=f"{spec.name}/0")
        locks = LockTable.create()
        context = WorkerContext(
            group=spec.name,
            rank=0,
            local_rank=0,
            world_size=1,
            layout=spec.layout,
            coordinates={},
            # What this process sees is not for a lease to change.
            devices=self._lease.places,
            epoch=1,
            incarnation=1,
            rendezvous=None,
            # The driver's own logger: this worker is the driver.
            log=structlog.get_logger().bind(group=spec.name, rank=0, incarnation=1, epoch=1),
            _locks=LockTable(locks),
            _listener=listener,
        )
        descriptors.close(locks)  # it stays mapped
        seed = Seed(
            factory=spec.factory,
            keywords=spec.keywords[0],
            labels=labels,
            rank=0,
            local_rank=0,
            world_size=1,
            layout=spec.layout,
            coordinates={},
            devices=self._lease.places,
            rendezvous=None,
        )
        self._layout = spec.layout
        self._turn = threading.RLock()  # a method may call its own executor
        self._host = WorkerHost(seed, context)
        try:
            self._host.start()
        except BaseException:
            self._let_go()
            raise
        self._open = True

    def run(self, name: str, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call and return its value."""
        method, args, kwargs = _arrive(name, method, args, kwargs)
        try:
            with self._turn:
                value = self._host.invoke(method, args, kwargs)
                if isinstance(value, AsyncOutput):
                    value = value.get_output()
        except Exception as error:
            with suppress(Exception):  # an exception type may refuse further attributes
                error.add_note(f"raised by rank 0 in {name} (inline)")
            raise
        return _travel(value, f"the reply of {name}")

    def stream(
        self,
        name: str,
        method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rank: int | None,
    ) -> Iterator[Any]:
        """Run one call and yield the items of what it returns."""
        method, args, kwargs = _arrive(name, method, args, kwargs)
        try:
            items = iter(self._host.invoke(method, args, kwargs))
            while True:
                with self._turn:
                    item = next(items, _END)
                if item is _END:
                    return
                travelled = _travel(item, f"an item of {name}")
                yield (0, travelled) if rank is None else travelled
        except Exception as error:
            with suppress(Exception):  # an exception type may refuse further attributes
                error.add_note(f"raised by rank 0 in {name} (inline)")
            raise

    def view(self) -> GroupView:
        """Return what the group looks like."""
        info = RankInfo(0, os.getpid(), 1, 1, "up" if self._open else "down", str(self._lease))
        return GroupView(layout=self._layout, epoch=1, ranks=(info,))

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Return the devices it chose from."""
        return self._pool.status()

    def close(self) -> None:
        """Stop the worker."""
        if self._open:
            self._open = False
            self._host.stop(SHUTDOWN)
            self._let_go()

    def _let_go(self) -> None:
        self._pool.give_back(self._lease, os.getpid())
        self._pool.close()


_END = object()


def _arrive(
    name: str, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return the method and the arguments of a call as a worker would have them."""
    try:
        arrived: tuple[Any, tuple[Any, ...], Mapping[str, Any]]
        arrived = _travel((method, args, kwargs), f"the arguments of {name}")
    except NotPicklable as error:
        raise culprit(name, args, kwargs, error) from error.__cause__
    return arrived


def _travel(value: Any, what: str) -> Any:
    encoded = encode(value, what)
    return decode(encoded.body, [memoryview(bytearray(view)) for view in encoded.buffers])


class InlineGroup:
    """Rank 0 of 1; its methods are those of `RankGroup`."""

    def __init__(self, spec: ExecutorSpec, methods: Methods) -> None:
        self._name = spec.name
        self.log = structlog.get_logger(group=spec.name)
        self._methods = methods
        self._numbers = itertools.count()
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self._closed = False
        self._rank = InlineRank(spec, self._emitted)

    def call(
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
        stream: Incoming | None = None,
        aggregate: Callable[[list[Any], int], Any] | None = None,
        lead: int = 0,
        at_once: bool = True,
    ) -> Any:
        """Run a call here and now, and return its value, its future or its stream."""
        del at_once  # nothing waits for its turn
        if timeout is not None:
            check_timeout(timeout)
        name, _ = self._methods.declared_of(method, each)
        terms_of(
            now=0.0,
            timeout=timeout,
            on_death=on_death or "fail",
            retries=retries,
            on_timeout=on_timeout,
            tell=tell,
        )
        self.check_open()
        if stream is not None:
            return InlineStream(self._rank.stream(name, method, *each[0], rank))
        future: Future[Any] = Future()
        try:
            value = self._rank.run(name, method, *each[0])
        except Exception as error:  # noqa: BLE001  # settled below, as from a process
            if shape is Shape.GATHER:
                future.set_result([Outcome(0, OutcomeKind.ERROR, error=error)])
            else:
                future.set_exception(error)
        else:
            if shape is Shape.GATHER:
                value = [Outcome(0, OutcomeKind.OK, value)]
            elif shape is Shape.COLLECTIVE and aggregate is not None:
                value = aggregate([value], lead)
            elif shape is Shape.COLLECTIVE and want is None:
                value = [value]
            future.set_result(value)
        return future if non_block else future.result()

    # --- looking ------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a call would be accepted without blocking."""
        return True

    @property
    def is_failed(self) -> bool:
        """Whether it has ended by itself, for which it has no process."""
        return False

    def view(self) -> GroupView:
        """Return what it looks like."""
        return self._rank.view()

    def ranks(self) -> tuple[RankInfo, ...]:
        """Return its one rank."""
        return self._rank.view().ranks

    def status(self) -> Status:
        """Return how the executor is doing."""
        return status_of(
            self._name,
            self._rank.view(),
            state="ended" if self._closed else "serving",
            devices=self._rank.devices(),
        )

    def check_health(self, timeout: float) -> None:
        """Return at once: its main loop is the caller."""
        check_seconds("timeout", timeout)
        self.check_open()

    def when_failed(self, callback: Callable[[ExitReason], None]) -> None:
        """Forget *callback*: it never comes to that."""

    def listen(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Hand what the worker emits to *callback*, in the caller's thread."""
        number = next(self._numbers)
        self._listeners[number] = callback

        def leave() -> None:
            self._listeners.pop(number, None)

        return leave

    def check_open(self) -> None:
        """Raise `ExecutorClosed` where it takes no calls any more."""
        if self._closed:
            msg = f"executor {self._name} was closed; build a new one"
            raise ExecutorClosed(msg)

    # --- changing -----------------------------------------------------------------------

    def save(self, timeout: float | None) -> Checkpoint:
        """Never asked: a spec with a checkpoint policy is not inline."""
        raise NotImplementedError

    def reserve(self, world_size: int) -> None:
        """Do nothing: a rank in this process has no descriptors."""

    def change(self, *_: object, **__: object) -> None:
        """Change nothing: there is one rank, and no process to restart."""
        self.check_open()

    def drain(self, timeout: float | None) -> None:  # noqa: ARG002  # as above
        """Return at once: nothing is ever in flight."""
        self.check_open()

    # --- ending -------------------------------------------------------------------------

    def close(self) -> None:
        """End it."""
        self._closed = True
        self._rank.close()

    request_close = kill = close

    def _emitted(self, rank: int, value: Any) -> None:
        event = Emitted(self._name, rank, 1, 1, value, time.monotonic())
        for listener in list(self._listeners.values()):
            listener(event)
