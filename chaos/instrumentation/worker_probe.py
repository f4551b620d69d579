"""The probe in a worker: records the calls that run, and injects faults into its worker.

Guarantees: the begin of a call is in the journal before its first line runs, and its end before the
reply leaves, even if the worker dies; a fault, before it is injected. A reply carries its
call, rank, incarnation and sending, so that the check does not rely on the driver's own records.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.actors import AsyncOutput
from phalanx.chaos.history.events import CallBegan, CallEnded, RankRan, WorkerStarted
from phalanx.chaos.history.journal import SUFFIX, Journal, now
from phalanx.chaos.nemesis.worker_faults import Orders, inject_here
from phalanx.runtime import is_in_process_group, procfs

from .leaks import WORKERS, keys_in, name_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from phalanx.actors import WorkerContext
    from phalanx.chaos.nemesis.worker_faults import Moment


_BEAT = 0.01  # seconds


@dataclass(frozen=True, slots=True)
class InstrumentedCall:
    """The value that is sent in place of a call's method.

    Attributes:
        call: The number of the call in the run.
        method: A method's name, or a callable.
        is_stream: Whether its result is consumed item by item.
    """

    call: int
    method: str | Callable[..., Any]
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class TaggedReply:
    """The value that is sent in place of a reply, or of item number *item* of a stream."""

    call: int
    rank: int
    incarnation: int
    wire: int
    value: Any
    item: int | None = None


class ProbedWorker(NamedTuple):
    """The worker to observe; unpickles to its `WorkerProbe`."""

    folder: Path
    group: str
    rank: int
    incarnation: int
    is_on_node: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerProbe, tuple(self)


class WorkerProbe:
    """Observes one incarnation of one rank, from within. A `WorkerProbe`."""

    def __init__(self, *worker: Any) -> None:
        self._worker = ProbedWorker(*worker)
        self._who = self._worker._asdict()
        self._folder: Path = self._who.pop("folder")
        self._is_on_node: bool = self._who.pop("is_on_node")
        self._orders = Orders(self._folder)
        name = f"{self._worker.group}-{self._worker.rank}".replace("/", "_")
        self._own = f"{name}-{self._worker.incarnation}-{os.getpid()}"
        self._journal = Journal(self._folder, f"worker-{self._own}")
        self._pids = self._folder / f"{name}{WORKERS}"  # of all incarnations of this rank
        self._context: WorkerContext | None = None
        self._turn = 0
        self.after_reply: Callable[[], None] = lambda: self._obey("reply")

    def woke(self, context: WorkerContext, *, kept: bool) -> None:
        """Record that this incarnation starts, or joins another epoch."""
        self._context = context
        where = context.rendezvous
        age = _age()  # before the time of the event: else a pause between makes it look older
        self._journal.write(
            WorkerStarted(
                **self._whose(),
                pid=os.getpid(),
                age=age,
                rendezvous="" if where is None else f"{where.address}:{where.port}/{where.prefix}",
                kept=kept,
                outlived=() if kept else tuple(self._outlived()),
            )
        )
        if not kept:
            self._note(os.getpid())
            name_files()
            if self._is_on_node:
                threading.Thread(target=self._beat, name="chaos-beats", daemon=True).start()
            if self._worker.incarnation > 1:
                self._obey("start")

    def _outlived(self) -> Iterator[int]:
        """Yield the processes of earlier incarnations of this rank that still exist."""
        for pid, ticks in sorted(keys_in([self._pids])):
            task = procfs.read(pid)
            if task is None or task.ticks != ticks or task.is_dead:
                continue
            if not self._is_on_node or task.state != "T":  # of a frozen node, which runs nothing
                yield pid

    def _beat(self) -> None:
        """Record until the end of this process that it runs."""
        ran = RankRan(**self._whose(), pid=os.getpid(), seconds=0.0)
        with (self._folder / f"beats-{self._own}{SUFFIX}").open("wb", buffering=0) as file:
            while True:
                with contextlib.suppress(OSError, MemoryError):  # as of the fault `memory`
                    line = replace(ran, seconds=now() - ran.at).to_json()
                    os.pwrite(file.fileno(), f"{line:512}\n".encode(), 0)  # over the one before
                time.sleep(_BEAT)

    def _note(self, pid: int) -> None:
        task = procfs.read(pid)
        if task is not None:
            # Of a full disk the journal tells.
            with contextlib.suppress(OSError), self._pids.open("a") as file:
                file.write(f"{pid} {task.ticks}\n")

    # --- calls --------------------------------------------------------------------------

    def invoke(
        self,
        run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any],
        method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wire: int,
    ) -> Any:
        """Run one call and return its tagged reply."""
        call = method
        if not isinstance(call, InstrumentedCall):
            return run(call, args, kwargs)
        self._turn += 1
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names only
        whose = self._whose(call, wire)
        self._journal.write(CallBegan(**whose, turn=self._turn, descriptors=descriptors))
        try:
            self._obey("begin")
            result = run(call.method, args, kwargs)
            self._obey("end")
        except BaseException as error:
            self._end(call, wire, type(error).__name__)
            raise
        if call.is_stream:
            items = self._items(call, wire, result)
            next(items)  # a generator that is closed before it has begun would record no end
            return items
        self._end(call, wire)
        if isinstance(result, AsyncOutput):
            return _TaggedOutput(result, lambda value: self._reply(call, wire, value))
        return self._reply(call, wire, result)

    def _items(self, call: InstrumentedCall, wire: int, made: Any) -> Iterator[Any]:
        try:
            yield  # for `invoke`
            for index, item in enumerate(made):
                yield self._reply(call, wire, item, index)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and hasattr(made, "close"):
                made.close()  # as without this generator between them
            self._end(call, wire, type(error).__name__)
            raise
        self._end(call, wire)

    def _reply(
        self, call: InstrumentedCall, wire: int, value: Any, item: int | None = None
    ) -> TaggedReply:
        return TaggedReply(
            call.call, self._worker.rank, self._worker.incarnation, wire, value, item
        )

    def _end(self, call: InstrumentedCall, wire: int, error: str = "") -> None:
        joined = bool(error) and is_in_process_group()
        self._journal.write(CallEnded(**self._whose(call, wire), error=error, joined=joined))

    def _whose(self, call: InstrumentedCall | None = None, wire: int = 0) -> dict[str, Any]:
        what = {} if call is None else {"call": call.call, "wire": wire}
        # Read for each event: a rank that stays up takes the next epoch from its next call, without
        # an `on_reform`.
        epoch = 0 if self._context is None else self._context.epoch
        return {"at": now(), "epoch": epoch, **self._who, **what}

    def _obey(self, moment: Moment) -> None:
        """Inject what is ordered of this rank at *moment*."""
        order = self._orders.take(self._worker.group, self._worker.rank, moment)
        if order is None:
            return
        fault, driver = order
        if driver is not None:
            self._journal.write(fault.injected(group=self._worker.group, pid=driver.pid))
            driver.inject(fault.fault, fault.seconds)
            return
        self._journal.write(fault.injected(**self._who, pid=os.getpid()))
        child = inject_here(fault.fault, fault.seconds)
        if child is not None:
            self._note(child)


def _age() -> float:
    """Return how long ago this process was started, up to a tick too much."""
    task = procfs.read(os.getpid())
    assert task is not None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - task.ticks / os.sysconf("SC_CLK_TCK")


class _TaggedOutput(AsyncOutput):
    """An output that is still being computed, to be tagged."""

    def __init__(self, made: AsyncOutput, reply: Callable[[Any], TaggedReply]) -> None:
        self._made = made
        self._reply = reply

    def get_output(self) -> TaggedReply:
        return self._reply(self._made.get_output())
