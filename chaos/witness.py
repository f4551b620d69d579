"""The worker's side of a run: writes down what is really run, and does to itself what is ordered.

Guarantees: what a worker begins is in the file before its first line runs, and what it ends before
its answer leaves, whatever then becomes of it; an order is carried out once, by one process, and
only after that has been written down.

Left to others: the faults themselves (`orders`).
"""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.actors import AsyncOutput
from phalanx.runtime import is_in_process_group, read_task

from .belongings import note_made
from .envelope import Letter, Order, Reply
from .faults import FAULTS
from .journal import Journal, now
from .kin import WORKERS, Kin
from .orders import BEFORE, INSTEAD, carry_out, carry_out_on
from .referee_records import Struck
from .worker_records import Began, Ended, Woke

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from phalanx.actors import WorkerContext

_DEAD = ("Z", "X", "x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Whom a witness is to watch.

    Attributes:
        folder: The folder of the run.
        group: The group's name in the run.
        start: What is to go wrong in its start.
    """

    folder: str
    group: str
    rank: int
    incarnation: int
    start: tuple[Order, ...] = ()

    def pickled(self) -> bytes:
        """Return what becomes a `Witness` of this where it is unpickled."""
        return pickle.dumps(_Sent(self))


class _Sent:
    def __init__(self, post: Post) -> None:
        self._post = post

    def __reduce__(self) -> tuple[Any, ...]:
        return Witness, (self._post,)


class Witness:
    """Watches one incarnation of one rank, from within."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._folder = Path(post.folder)
        name = f"{post.group}-{post.rank}".replace("/", "_")
        self._pids = self._folder / f"{name}{WORKERS}"
        self._journal = Journal(self._folder, f"worker-{name}-{post.incarnation}-{os.getpid()}")
        note_made(self._folder)
        self._context: WorkerContext | None = None
        self._turn = 0
        self._due: list[Order] = []
        self.after_reply: Callable[[], None] = self._answered

    # --- its start ----------------------------------------------------------------------

    def woke(self, context: WorkerContext, *, kept: bool) -> None:
        """Write down that this incarnation starts, or joins another epoch; do what is ordered."""
        self._context = context
        where = context.rendezvous
        self._journal.write(
            Woke(
                at=now(),
                group=self._post.group,
                rank=self._post.rank,
                incarnation=self._post.incarnation,
                epoch=context.epoch,
                pid=os.getpid(),
                rendezvous="" if where is None else f"{where.address}:{where.port}/{where.prefix}",
                kept=kept,
                outlived=() if kept else tuple(self._living()),
            )
        )
        if kept:
            return
        self._note(os.getpid())
        for order in self._post.start:
            self._obey(order)

    def _living(self) -> Iterator[int]:
        """Yield those of this rank's earlier processes that are still there."""
        with contextlib.suppress(FileNotFoundError):
            for line in self._pids.read_text().splitlines():
                pid, ticks = map(int, line.split())
                task = read_task(pid)
                if task is None or task.ticks != ticks or task.state in _DEAD:
                    continue
                if pid != os.getpid():
                    yield pid

    def _note(self, pid: int) -> None:
        task = read_task(pid)
        if task is not None:
            with self._pids.open("a") as file:
                file.write(f"{pid} {task.ticks}\n")

    # --- its calls ----------------------------------------------------------------------

    def invoke(
        self,
        run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any],
        method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        wire: int,
    ) -> Any:
        """Run one call and answer for it."""
        if not isinstance(method, Letter):
            return run(method, args, kwargs)
        letter = method
        self._begin(letter, wire)
        mine = [order for order in letter.orders if order.rank in (self._post.rank, -1)]
        self._due = [order for order in mine if order.at == "after_reply"]
        instead = [order for order in mine if order.fault in INSTEAD]
        before = [order for order in mine if order.fault in BEFORE]
        for order in mine:
            if order not in self._due and order not in instead and order not in before:
                self._obey(order)
        try:
            for order in before:
                self._obey(order)
            result = run(letter.method, args, kwargs)
            for order in instead:
                self._obey(order)
        except BaseException as error:
            self._end(letter, wire, type(error).__name__)
            raise
        if letter.is_stream:
            return self._items(letter, wire, result)
        self._end(letter, wire)
        if isinstance(result, AsyncOutput):
            return _Later(result, lambda value: self._reply(letter, wire, value))
        return self._reply(letter, wire, result)

    def _answered(self) -> None:
        due, self._due = self._due, []
        for order in due:
            self._obey(order)

    def _items(self, letter: Letter, wire: int, made: Any) -> Iterator[Any]:
        try:
            for index, item in enumerate(made):
                yield self._reply(letter, wire, item, index)
        except BaseException as error:
            if isinstance(error, GeneratorExit) and hasattr(made, "close"):
                made.close()  # as it is without us between them
            self._end(letter, wire, type(error).__name__)
            raise
        self._end(letter, wire)

    def _reply(self, letter: Letter, wire: int, value: Any, item: int | None = None) -> Reply:
        return Reply(letter.call, self._post.rank, self._post.incarnation, wire, value, item)

    def _begin(self, letter: Letter, wire: int) -> None:
        self._turn += 1
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names only
        began = Began(**self._of(letter, wire), turn=self._turn, descriptors=descriptors)
        self._journal.write(began)

    def _end(self, letter: Letter, wire: int, error: str = "") -> None:
        joined = bool(error) and is_in_process_group()
        self._journal.write(Ended(**self._of(letter, wire), error=error, joined=joined))

    def _of(self, letter: Letter, wire: int) -> dict[str, Any]:
        """Return what all records of a call say: when, where and which."""
        post = self._post
        return {
            "at": now(),
            "group": post.group,
            "rank": post.rank,
            "incarnation": post.incarnation,
            "epoch": self._epoch,
            "call": letter.call,
            "wire": wire,
        }

    @property
    def _epoch(self) -> int:
        return 0 if self._context is None else self._context.epoch

    # --- its orders ---------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        if not claim(self._folder, order.key):
            return
        if FAULTS[order.fault].lethal:
            Kin(self._folder).look()
        own = order.whom is None
        self._journal.write(
            Struck(
                at=now(),
                strike=order.strike,
                fault=order.fault,
                target=order.target,
                point=order.at if order.aimed else "",
                group=self._post.group,
                rank=self._post.rank if own else None,
                incarnation=self._post.incarnation if own else None,
                pid=os.getpid() if order.whom is None else order.whom[0],
                lethal=FAULTS[order.fault].lethal,
            )
        )
        if order.whom is not None:
            carry_out_on(order.whom, order.fault, order.seconds)
            return
        child = carry_out(order.fault, order.seconds)
        if child is not None:
            self._note(child)


class _Later(AsyncOutput):
    """An answer that is still being made, to be put into its envelope."""

    def __init__(self, made: AsyncOutput, reply: Callable[[Any], Reply]) -> None:
        self._made = made
        self._reply = reply

    def get_output(self) -> Reply:
        return self._reply(self._made.get_output())


def is_claimed(folder: Path, order: Order) -> bool:
    """Whether somebody has carried out *order*, or it has been withdrawn."""
    return _claim_path(folder, order.key).exists()


def claim(folder: Path, key: str) -> bool:
    """Whether nobody has carried out the order *key*; from now on somebody has."""
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        os.close(os.open(_claim_path(folder, key), flags, 0o600))
    except FileExistsError:
        return False
    return True


def _claim_path(folder: Path, key: str) -> Path:
    return folder / f"order-{key}.done"
