"""Callers that make every kind of call there is, and a hand that strikes meanwhile; both seeded."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.booked import Answer, Ordered
from tests.chaos.books import Books, Entry

from phalanx.actors import CallFuture, Executor, OutcomeKind
from phalanx.runtime import tree
from phalanx.supervision import CallTimeout, RemoteError, WorkerDied

WAIT = 120.0  # seconds for a call; one that needs them has been lost
PATIENT = 100_000  # retries
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
            for outcome in outcomes:
                match outcome.kind:
                    case OutcomeKind.DEAD if isinstance(outcome.error, WorkerDied):
                        continue
                    case OutcomeKind.ERROR if _was_ordered(outcome.error):
                        continue
                    case OutcomeKind.OK:
                        answer, _ = outcome.value
                        if answer[1] != outcome.rank:
                            self._books.complain(entry, f"{outcome.rank}'s outcome is {answer}")
                        entry.answers.append(answer)
                    case _:
                        self._books.complain(entry, repr(outcome))
            if len(entry.answers) < len(outcomes):
                raise _PartlyError(str(sorted(kinds)))
            return []

        self._settle(entry, call)

    def _single(self) -> None:
        entry = self._open("single", self._retries())
        rank = self._chance.randrange(self._ex.world_size)

        def call() -> Any:
            terms = self._terms(entry)
            value = self._ex.call(rank, "work", WAIT, self._work(entry), **terms)
            if value[0][1] != rank:
                self._books.complain(entry, f"rank {rank} was asked, {value[0]} answered")
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
        rank, count = self._chance.randrange(self._ex.world_size), self._chance.randint(1, 30)

        def call() -> list[Answer]:
            numbers: list[int] = []
            with self._ex.stream("items", WAIT, (entry.token, count), rank=rank) as stream:
                for answer, number in stream:
                    numbers.append(number)
                    entry.answers.append(answer)
            if numbers != list(range(count)):
                self._books.complain(entry, f"{count} items came as {numbers}")
            return []

        self._settle(entry, call)

    def _streams(self) -> None:
        entry = self._open("streams")
        count = self._chance.randint(1, 20)

        def call() -> list[Answer]:
            numbers: dict[int, list[int]] = {rank: [] for rank in range(self._ex.world_size)}
            with self._ex.stream("items", WAIT, (entry.token, count)) as stream:
                for rank, (answer, number) in stream:
                    numbers[rank].append(number)
                    entry.answers.append(answer)
            if any(each != list(range(count)) for each in numbers.values()):
                self._books.complain(entry, f"{count} items came as {numbers}")
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
        except _PartlyError as partly:
            outcome = f"partly {partly}"
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
                self._books.complain(entry, f"never came back: {late}")
        except CancelledError:
            outcome = "cancelled"
        except Exception as error:  # whatever else it is, it is accounted for
            outcome = "error"
            if not _was_ordered(error):
                self._books.complain(entry, f"raised {error!r}")
        else:
            outcome = "ok"
            entry.answers.extend(answer for answer, _ in values)
        self._books.settle(entry, outcome)


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

    def strike(self, times: int) -> None:
        """Strike until *times* faults have been delivered."""
        shared = self._ex._core.shared
        while self.struck.total() < times and not shared.gone.is_set():
            time.sleep(self._chance.uniform(0.0, 0.02))
            if self._chance.random() < 0.8:  # else it strikes in the middle of a restart
                with shared.changed:
                    shared.changed.wait_for(lambda: str(shared.view.phase) == "serving", WAIT)
                self._books.wait_for_more(self._chance.choice([0, 1, 2, 5, 10, 30]), 1.0)
            for _ in range(self._chance.choice([1, 1, 1, 1, 2, self._ex.world_size])):
                rank = self._chance.randrange(self._ex.world_size)
                self._strike(rank, self._chance.choice(self._faults))

    def _strike(self, rank: int, fault: str) -> None:
        pid = self._ex.ranks[rank].pid
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
        task = tree.read(pid)
        if task is None or task.parent != os.getpid() or task.state == "Z":
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True
