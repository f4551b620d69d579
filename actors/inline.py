"""One rank in the caller's own thread and process, for debuggers and `breakpoint()`.

Guarantees: arguments and results travel through the same encoding as between processes, so what
works inline works in a worker; errors look the same. There is no process to kill and no
supervision: an exception of the start is raised as it is.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from phalanx.runtime import (
    AsyncOutput,
    DevicePool,
    LockTable,
    WorkerLabels,
    decode,
    encode,
    ledger,
)
from phalanx.supervision import SHUTDOWN, NotPicklable

from .context import WorkerContext
from .hosting import Seed, WorkerHost
from .recipe import culprit
from .status import GroupView, RankInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from phalanx.runtime import DeviceStatus

    from .spec import ExecutorSpec


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
        ledger.close(locks)  # it stays mapped
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
