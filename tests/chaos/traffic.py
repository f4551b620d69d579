"""Callers that make every kind of call there is, and a hand that strikes meanwhile; both seeded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.booked import Answer, Ordered
from tests.chaos.books import Books, Entry

from phalanx.actors import CallFuture, Executor, OutcomeKind
from phalanx.runtime.linux import process_tree
from phalanx.supervision import CallTimeout, RemoteError, SpecError, WorkerDied

WAIT = 120.0  # seconds for a call; one that needs them has been lost
PATIENT = 100_000  # retries
LONGEST_START = 5.0  # seconds, on a busy machine
LEAST = 2  # ranks that a group always has
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "term": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}
"""Faults that strike at any instruction; all others are orders to the next call of a rank."""


class Caller:
    """One thread of calls."""

    def __init__(self, ex: Executor[Any], books: Books, number: int, seed: int) -> None:
        self._ex = ex
        self._books = books
        self._number = number
        self._chance = random.Random(f"{seed}/{number}")
        self._made = 0
        self._kinds: list[Callable[[], None]] = [
            self._collective,
            self._collective,
            self._collective,
            self._pipelined,
            self._gather,
            self._single,
            self._pool,
            self._stream,
            self._streams,
            self._hasty,
            self._withdrawn,
            self._large,
            self._scatter,
            self._tell,
        ]

    def run(self, over: threading.Event) -> None:
        while not over.is_set():
            self._chance.choice(self._kinds)()

    def _open(self, shape: str, retries: int = 0) -> Entry:
        self._made += 1
        return self._books.open(f"{self._number}.{self._made}", shape, retries)

    def _retries(self) -> int:
        return self._chance.choice([0, 0, 1, 2, PATIENT, PATIENT])

    def _terms(self, entry: Entry) -> dict[str, Any]:
        retry = entry.retries > 0
        return {"on_death": "retry" if retry else "fail", "retries": max(1, entry.retries)}

    def _collective(self) -> None:
        entry = self._open("collective", self._retries())
        terms = self._terms(entry)
        self._settle(
            entry,
            lambda: self._ex.collective_rpc("work_together", WAIT, self._work(entry), **terms),
        )

    def _large(self) -> None:
        """What does not fit into a packet, both ways."""
        entry = self._open("collective", self._retries())
        load = os.urandom(64) * 3000
        terms = self._terms(entry)

        def call() -> Any:
            values = self._ex.collective_rpc(
                "work_together", WAIT, (entry.token, 0.0, load), **terms
            )
            if any(back != load for _, back in values):
                self._books.complain(entry, "its load came back changed")
            return values

        self._settle(entry, call)

    def _pipelined(self) -> None:
        made: list[tuple[Entry, CallFuture]] = []
        for _ in range(self._chance.randint(2, 10)):
            entry = self._open("collective", self._retries())
            terms = self._terms(entry)
            made.append(self._future(entry, "work_together", **terms))
        for entry, future in made:
            self._settle(entry, partial(future.result, WAIT))

    def _gather(self) -> None:
        entry = self._open("gather")

        def call() -> list[Answer]:
            outcomes = self._ex.gather("work", WAIT, self._work(entry))
            kinds = Counter(str(outcome.kind) for outcome in outcomes)
            if [outcome.rank for outcome in outcomes] != list(range(len(outcomes))):
                self._books.complain(entry, f"outcomes {outcomes}", "swapped")
            for outcome in outcomes:
                match outcome.kind:
                    case OutcomeKind.DEAD if isinstance(outcome.error, WorkerDied):
                        continue
                    case OutcomeKind.ERROR if _was_ordered(outcome.error):
                        continue
                    case OutcomeKind.OK:
                        answer, _ = outcome.value
                        if answer[1] != outcome.rank:
                            told = f"{outcome.rank}'s outcome is {answer}"
                            self._books.complain(entry, told, "swapped")
                        entry.answers.append(answer)
                    case _:
                        self._books.complain(entry, repr(outcome))
            if len(entry.answers) < len(outcomes):
                raise _PartlyError(str(sorted(kinds)))
            return []

        self._settle(entry, call)

    def _single(self) -> None:
        entry = self._open("single", self._retries())
        rank = self._chance.randrange(LEAST)

        def call() -> Any:
            terms = self._terms(entry)
            value = self._ex.call(rank, "work", WAIT, self._work(entry), **terms)
            if value[0][1] != rank:
                told = f"rank {rank} was asked, {value[0]} answered"
                self._books.complain(entry, told, "swapped")
            return [value]

        self._settle(entry, call)

    def _pool(self) -> None:
        made: list[tuple[Entry, CallFuture]] = []
        for _ in range(self._chance.randint(1, 6)):
            entry = self._open("pool", self._retries())
            terms = self._terms(entry)
            future = self._ex.submit("work", args=self._work(entry), timeout=WAIT, **terms)
            made.append((entry, self._count(entry, future)))
        for entry, future in made:
            self._settle(
                entry,
                lambda: [future.result(WAIT)],  # noqa: B023  # called at once
            )

    def _stream(self) -> None:
        entry = self._open("stream")
        rank, count = self._chance.randrange(LEAST), self._chance.randint(1, 30)

        def call() -> list[Answer]:
            numbers: list[int] = []
            with self._ex.stream("items", WAIT, (entry.token, count), rank=rank) as stream:
                for answer, number in stream:
                    numbers.append(number)
                    entry.answers.append(answer)
            if numbers != list(range(count)):
                self._books.complain(entry, f"{count} items came as {numbers}", "lost")
            return []

        self._settle(entry, call)

    def _streams(self) -> None:
        entry = self._open("streams")
        count = self._chance.randint(1, 20)

        def call() -> list[Answer]:
            numbers: dict[int, list[int]] = defaultdict(list)
            with self._ex.stream("items", WAIT, (entry.token, count)) as stream:
                for rank, (answer, number) in stream:
                    numbers[rank].append(number)
                    entry.answers.append(answer)
            in_full = {rank: list(range(count)) for rank in range(max(LEAST, len(numbers)))}
            if numbers != in_full:
                self._books.complain(entry, f"{count} items came as {numbers}", "lost")
            return []

        self._settle(entry, call)

    def _hasty(self) -> None:
        """A call whose deadline may pass first: then its answers are nobody's."""
        entry = self._open("collective", self._retries())
        terms = self._terms(entry)
        limit = self._chance.uniform(0.0, 0.01)
        self._settle(
            entry,
            lambda: self._ex.collective_rpc("work_together", limit, self._work(entry), **terms),
            may_expire=True,
        )

    def _scatter(self) -> None:
        entry = self._open("collective", self._retries())
        terms = self._terms(entry)
        loads = [f"for {rank}" for rank in range(self._ex.world_size)]

        def call() -> Any:
            each = [(entry.token, 0.0, load) for load in loads]
            try:
                values = self._ex.scatter("work_together", each, WAIT, **terms)
            except SpecError as error:  # the group has another size by now
                raise _RefusedError from error
            if [load for _, load in values] != loads:
                self._books.complain(entry, f"{loads} came back as {values}", "swapped")
            return values

        self._settle(entry, call)

    def _tell(self) -> None:
        entry = self._open("tell")
        rank = self._chance.choice([None, self._chance.randrange(LEAST)])

        def call() -> Any:
            self._ex.tell("work", self._work(entry), rank=rank)
            return []

        self._settle(entry, call)

    def _withdrawn(self) -> None:
        entry = self._open("collective")
        _, future = self._future(entry, "work_together")
        future.cancel()
        self._settle(entry, lambda: future.result(WAIT))

    def _work(self, entry: Entry) -> tuple[str, float]:
        return entry.token, self._chance.choice([0.0, 0.0, 0.001, 0.003])

    def _future(self, entry: Entry, method: str, **terms: Any) -> tuple[Entry, CallFuture]:
        future = self._ex.collective_rpc(method, WAIT, self._work(entry), non_block=True, **terms)
        return entry, self._count(entry, future)

    def _count(self, entry: Entry, future: CallFuture) -> CallFuture:
        entry.told = 0

        def told(_: object) -> None:
            assert entry.told is not None
            entry.told += 1  # on the one callback thread

        future.add_done_callback(told)
        return future

    def _settle(self, entry: Entry, call: Callable[[], Any], *, may_expire: bool = False) -> None:
        """Make the call and enter what became of it."""
        try:
            values = call()
        except Exception as error:  # whatever it is, it is accounted for
            self._fail(entry, error, may_expire=may_expire)
        else:
            entry.answers.extend(answer for answer, _ in values)
            self._books.settle(entry, "ok")

    def _fail(self, entry: Entry, error: Exception, *, may_expire: bool = False) -> None:
        try:
            raise error
        except _PartlyError as partly:
            outcome = f"partly {partly}"
        except _RefusedError:
            outcome = "refused"
        except WorkerDied as died:
            outcome = "died"
            if entry.retries and len(died.reports) != entry.retries + 1:
                told = f"died with {len(died.reports)} reports, which are its attempts"
                self._books.complain(entry, told)
            if not died.reports:
                self._books.complain(entry, "died without a report")
        except CallTimeout as late:
            outcome = "expired"
            if not may_expire:
                self._books.complain(entry, f"never came back: {late}", "hung")
        except (CancelledError, asyncio.CancelledError):
            outcome = "cancelled"
        except Exception as other:
            outcome = "error"
            if not _was_ordered(other):
                self._books.complain(entry, f"raised {other!r}")
        self._books.settle(entry, outcome)


class AsyncCaller(Caller):
    """One task of calls, awaited."""

    async def run_async(self, over: threading.Event) -> None:
        aio = self._ex.aio
        while not over.is_set():
            shape = self._chance.choice(
                ["collective", "gather", "single", "pool", "stream", "tell"]
            )
            is_hasty = self._chance.random() < 0.1
            retries = 0 if shape in ("gather", "stream", "tell") else self._retries()
            entry = self._open(shape, retries)
            terms, rank = self._terms(entry), self._chance.randrange(LEAST)
            work = self._work(entry)
            made: Any
            if shape == "collective":
                made = aio.collective_rpc("work_together", WAIT, work, **terms)
            elif shape == "gather":
                made = self._parts(aio.gather("work", WAIT, work))
            elif shape == "single":
                made = aio.call(rank, "work", WAIT, work, **terms)
            elif shape == "pool":
                made = aio.submit("work", args=work, timeout=WAIT, **terms)
            elif shape == "stream":
                made = self._items(entry, aio.stream("items", WAIT, (entry.token, 5), rank=rank))
            else:
                made = aio.tell("work", work, rank=rank)
            try:
                if is_hasty and shape != "tell":
                    made = asyncio.wait_for(made, self._chance.uniform(0.0, 0.01))
                values = await made
            except TimeoutError as error:  # CallTimeout is one
                late = error if isinstance(error, CallTimeout) else CancelledError()
                self._fail(entry, late)
            except Exception as error:
                self._fail(entry, error)
            else:
                values = [values] if shape in ("single", "pool") else values or []
                entry.answers.extend(answer for answer, _ in values)
                self._books.settle(entry, "ok")

    async def _parts(self, gathering: Any) -> list[Any]:
        outcomes = await gathering
        if not all(outcome.ok for outcome in outcomes):
            raise _PartlyError(str(sorted({str(outcome.kind) for outcome in outcomes})))
        return [outcome.value for outcome in outcomes]

    async def _items(self, entry: Entry, stream: Any) -> list[Any]:
        with stream:
            made = [item async for item in stream]
        if [number for _, number in made] != list(range(5)):
            self._books.complain(entry, f"5 items came as {made}", "lost")
        return made


def run_async(callers: Sequence[AsyncCaller], over: threading.Event) -> None:
    """Run *callers* as tasks of one event loop."""

    async def run() -> None:
        await asyncio.gather(*(caller.run_async(over) for caller in callers))

    asyncio.run(run())


class _RefusedError(Exception):
    """A call that no rank may have begun."""


class _PartlyError(Exception):
    """A gather to which not every rank had an answer."""


def _was_ordered(error: BaseException | None) -> bool:
    if isinstance(error, RemoteError):
        return "UnpicklablyOrdered" in error.type_name
    return isinstance(error, Ordered)


class Hand:
    """Strikes ranks of *ex*, one after the other, as *faults* names them."""

    def __init__(
        self, ex: Executor[Any], books: Books, folder: Path, faults: Sequence[str], seed: int
    ) -> None:
        self._ex = ex
        self._books = books
        self._orders = folder / "orders"
        self._orders.mkdir()
        self._faults = faults
        self._chance = random.Random(f"{seed}/hand")
        self.struck: Counter[str] = Counter()
        self.changed = 0

    def strike(self, times: int) -> None:
        """Strike until *times* faults have been delivered."""
        shared = self._ex._core.shared
        while self.struck.total() < times and not shared.gone.is_set():
            time.sleep(self._chance.uniform(0.0, 0.02))
            if self._chance.random() < 0.8:  # else it strikes in the middle of a restart
                self._wait_until_serving(WAIT)
                self._books.wait_for_more(self._chance.choice([0, 1, 2, 5, 10, 30]), 1.0)
            for _ in range(self._chance.choice([1, 1, 1, 1, 2, self._ex.world_size])):
                rank = self._chance.randrange(self._ex.world_size)
                self._strike(rank, self._chance.choice(self._faults))

    def strike_after(self, least: float, most: float) -> None:
        """Strike a rank after so many seconds, mostly of a group that serves.

        Else a busy machine, on which a start takes longer than that, would never serve.
        """
        time.sleep(self._chance.uniform(least, most))
        if self._chance.random() < 0.8:
            self._wait_until_serving(2 * LONGEST_START)
        self._strike(self._chance.randrange(self._ex.world_size), self._chance.choice(self._faults))

    def _wait_until_serving(self, seconds: float) -> None:
        shared = self._ex._core.shared
        with shared.changed:
            shared.changed.wait_for(lambda: str(shared.view.phase) == "serving", seconds)

    def change(self, over: threading.Event, sizes: Sequence[int]) -> None:
        """Restart ranks, change their number and drain until *over*."""
        while not over.wait(self._chance.uniform(0.1, 1.5)):
            with contextlib.suppress(TimeoutError):  # it took too long, with kills all the while
                match self._chance.randrange(4):
                    case 0:
                        self._ex.restart(self._chance.randrange(LEAST), timeout=WAIT)
                    case 1:
                        self._ex.restart(timeout=WAIT)
                    case 2:
                        self._ex.resize(self._chance.choice(sizes), timeout=WAIT)
                    case _:
                        self._ex.drain(timeout=1.0)  # of calls that do not cease
            self.changed += 1

    def _strike(self, rank: int, fault: str) -> None:
        ranks = self._ex.ranks
        pid = ranks[rank].pid if rank < len(ranks) else None
        if pid is None:
            return
        if fault in SIGNALS:
            self.struck[fault] += _send(pid, SIGNALS[fault])
        elif fault.startswith("start_"):
            self._order(f"start-{rank}", fault.removeprefix("start_"), fault)
            if _send(pid, signal.SIGKILL):
                self.struck["kill"] += 1
        else:
            self._order(str(pid), fault, fault)

    def _order(self, name: str, how: str, fault: str) -> None:
        draft = self._orders / f".{name}"
        draft.write_text(how)
        draft.rename(self._orders / name)
        self.struck[fault] += 1

    def rest(self) -> None:
        """Take back what nobody has taken: those processes are gone, or idle."""
        for order in self._orders.iterdir():
            with contextlib.suppress(FileNotFoundError):
                fault = order.read_text()
                order.unlink()
                kind = f"start_{fault}" if order.name.startswith("start-") else fault
                self.struck[kind] -= 1


def _send(pid: int, number: int) -> bool:
    """Send *number* to our child *pid*; whether there was one."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        task = process_tree.read(pid)
        if task is None or task.parent != os.getpid() or task.state == "Z":
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True
