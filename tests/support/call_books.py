"""Books of calls: what their callers got, held against lines that the workers write themselves.

Independent of `phalanx.chaos`: workers append a line for each call that they begin or end, callers
note each outcome and reply, and `Books.audit` compares the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.processes import wait_until

from phalanx.actors import Executor, WorkerActor, WorkerContext
from phalanx.supervision import CallTimeout, SpecError, WorkerDied

Answer = tuple[str, int, int, int]
"""The call's own token; rank, incarnation and epoch of the worker that answers."""

SIZES = (2, 3, 4)
WAIT = 120.0  # seconds for a call; one that needs them has been lost
EVERYWHERE = ("collective", "gather", "streams")


class Booked(WorkerActor):
    """Appends a line for each call that it begins or ends, in one write."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / "effects"

    def on_start(self, ctx: WorkerContext) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def work(self, token: str, pause: float = 0.0, load: Any = None) -> tuple[Answer, Any]:
        self._book("began", token)
        time.sleep(pause)
        self._book("ended", token)
        return self._answer(token), load

    def items(self, token: str, count: int) -> Iterator[tuple[Answer, int]]:
        self._book("began", token)
        for number in range(count):
            yield self._answer(token), number
        self._book("ended", token)

    def _answer(self, token: str) -> Answer:
        return token, self.ctx.rank, self.ctx.incarnation, self.ctx.epoch

    def _book(self, kind: str, token: str) -> None:
        line = " ".join(map(str, (kind, *self._answer(token))))
        os.write(self._file, f"{line}\n".encode())


@dataclass(slots=True)
class Entry:
    """One call; *told*: how often its done-callback ran, for calls that have one."""

    token: str
    shape: str
    retries: int
    outcomes: list[str] = field(default_factory=list[str])
    answers: list[Answer] = field(default_factory=list[Answer])
    told: int | None = None


class Books:
    """All calls of one run, and what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries: dict[str, Entry] = {}
        self.wrong: list[str] = []
        kinds = ("lost", "doubled", "swapped", "stale", "hung", "other")
        self.sums: dict[str, int] = dict.fromkeys(kinds, 0)

    def report_error(self, entry: Entry, what: str, kind: str = "other") -> None:
        self.sums[kind] += 1
        self.wrong.append(f"{kind}: {entry.token} ({entry.shape}, {entry.retries}): {what}")

    def audit(self) -> None:
        # The callback thread may run later than the caller that had the result.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: all(entry.told != 0 for entry in self.entries.values()))
        began: dict[str, list[Answer]] = defaultdict(list)
        ended: dict[str, set[Answer]] = defaultdict(set)
        places: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for line in (self._folder / "effects").read_text().splitlines():
            kind, token, rank, incarnation, epoch = line.split()
            who = (token, int(rank), int(incarnation), int(epoch))
            if kind == "ended":
                ended[token].add(who)
                continue
            began[token].append(who)
            entry = self.entries.get(token)
            if entry is not None and entry.shape in EVERYWHERE and not entry.retries:
                places[who[3]][who[1]].append(token)
        for token in began.keys() - self.entries.keys():
            self.report_error(Entry(token, "none", 0), "run, and never made")
        for entry in self.entries.values():
            self._audit_one(entry, began[entry.token], ended[entry.token])
        for ranks in places.values():
            for here, there in itertools.pairwise(ranks.values()):
                both = set(here) & set(there)
                pairs = zip(
                    filter(both.__contains__, here), filter(both.__contains__, there), strict=False
                )
                for one, other in itertools.islice((p for p in pairs if p[0] != p[1]), 1):
                    self.report_error(
                        self.entries[one], f"another rank ran {other} then", "swapped"
                    )

    def _audit_one(self, entry: Entry, began: list[Answer], ended: set[Answer]) -> None:
        if len(entry.outcomes) != 1:
            kind = "doubled" if entry.outcomes else "lost"
            self.report_error(entry, f"has the outcomes {entry.outcomes}", kind)
            return
        if entry.told not in (None, 1):
            kind = "doubled" if entry.told else "lost"
            self.report_error(entry, f"its done-callback ran {entry.told} times", kind)
        for answer in entry.answers:
            if answer[0] != entry.token:
                self.report_error(entry, f"was answered with {answer}", "swapped")
            elif answer not in began:
                self.report_error(entry, f"{answer}, who never began it", "stale")
            elif entry.outcomes == ["ok"] and answer not in ended:
                self.report_error(entry, f"{answer}, who never ended it", "lost")
        one = entry.shape in ("single", "pool", "stream")
        often = Counter(0 if one else rank for _, rank, _, _ in began)
        if max(often.values(), default=0) > entry.retries + 1:
            self.report_error(entry, f"was begun too often: {began}", "doubled")
        whole = entry.shape in ("collective", "streams")
        if whole and not entry.retries and len({epoch for *_, epoch in began}) > 1:
            self.report_error(entry, f"ran in two epochs: {began}", "stale")
        if entry.outcomes == ["ok"]:
            ranks = [rank for _, rank, _, _ in entry.answers]
            if whole and len({epoch for *_, epoch in entry.answers}) > 1:
                self.report_error(entry, f"was answered from two epochs: {entry.answers}", "stale")
            if entry.shape in ("collective", "gather"):
                in_full = len(ranks) in SIZES and ranks == list(range(len(ranks)))
            else:
                in_full = entry.shape not in ("single", "pool") or len(ranks) == 1
            if not in_full:
                self.report_error(entry, f"was answered by {ranks}", "lost")


class Caller:
    """One thread, or one task, of calls."""

    def __init__(self, ex: Executor[Any], books: Books, number: int, seed: int) -> None:
        self._ex = ex
        self._books = books
        self._number = number
        self._chance = random.Random(f"{seed}/{number}")
        self._made = 0

    def run(self, over: threading.Event) -> None:
        shapes = (
            *(self._collective, self._collective, self._pipelined, self._gather, self._single),
            *(self._pool, self._stream, self._streams, self._hasty, self._abandoned, self._large),
            *(self._scatter, self._tell),
        )
        while not over.is_set():
            self._chance.choice(shapes)()

    def _open(self, shape: str, *, may_retry: bool = True) -> tuple[Entry, dict[str, Any]]:
        self._made += 1
        retries = self._chance.choice((0, 0, 1, 2, 100_000, 100_000)) if may_retry else 0
        entry = Entry(f"{self._number}.{self._made}", shape, retries)
        self._books.entries[entry.token] = entry
        terms = {"retries": retries}
        return entry, terms

    def _work(self, entry: Entry, load: Any = None) -> tuple[Any, ...]:
        return entry.token, self._chance.choice((0.0, 0.0, 0.001, 0.003)), load

    def _collective(self, load: Any = None) -> None:
        entry, terms = self._open("collective")
        work = self._work(entry, load)
        self._settle(entry, lambda: self._ex.collective_rpc("work", WAIT, work, **terms), load)

    def _large(self) -> None:
        self._collective(os.urandom(64) * 3000)  # more than a packet, both ways

    def _pipelined(self) -> None:
        made = [self._future(*self._open("collective")) for _ in range(self._chance.randint(2, 10))]
        for entry, future in made:
            self._settle(entry, partial(future.result, WAIT))

    def _abandoned(self) -> None:
        entry, future = self._future(*self._open("collective", may_retry=False))
        future.abandon()
        self._settle(entry, partial(future.result, WAIT))

    def _future(self, entry: Entry, terms: dict[str, Any]) -> tuple[Entry, Any]:
        work = self._work(entry)
        future = self._ex.collective_rpc("work", WAIT, work, non_block=True, **terms)
        return self._counted(entry, future)

    def _counted(self, entry: Entry, future: Any) -> tuple[Entry, Any]:
        entry.told = 0

        def count(_: object) -> None:
            entry.told = (entry.told or 0) + 1  # on the one callback thread

        future.add_done_callback(count)
        return entry, future

    def _gather(self) -> None:
        entry, _ = self._open("gather", may_retry=False)
        self._settle(entry, lambda: _whole(self._ex.gather("work", WAIT, self._work(entry))))

    def _single(self) -> None:
        entry, terms = self._open("single")
        rank = self._chance.randrange(min(SIZES))
        self._settle(
            entry, lambda: [self._ex.call("work", WAIT, self._work(entry), **terms, rank=rank)]
        )
        if any(answer[1] != rank for answer in entry.answers):
            self._books.report_error(entry, f"rank {rank} was called", "swapped")

    def _pool(self) -> None:
        made: list[tuple[Entry, Any]] = []
        for _ in range(self._chance.randint(1, 6)):
            entry, terms = self._open("pool")
            future = self._ex.submit("work", args=self._work(entry), timeout=WAIT, **terms)
            made.append(self._counted(entry, future))
        for entry, future in made:
            self._settle(entry, lambda: [future.result(WAIT)])  # noqa: B023  # called at once

    def _stream(self) -> None:
        entry, _ = self._open("stream", may_retry=False)
        count, rank = self._chance.randint(1, 30), self._chance.randrange(min(SIZES))

        def call() -> list[Any]:
            with self._ex.stream("items", WAIT, (entry.token, count), rank=rank) as stream:
                return list(stream)

        self._settle(entry, call, numbers=list(range(count)))

    def _streams(self) -> None:
        entry, _ = self._open("streams", may_retry=False)
        count = self._chance.randint(1, 20)

        def call() -> list[Any]:
            with self._ex.stream("items", WAIT, (entry.token, count)) as stream:
                taken = list(stream)
            ranks = {rank for rank, _ in taken}
            for rank in ranks:
                if [item[1] for r, item in taken if r == rank] != list(range(count)):
                    self._books.report_error(entry, f"of {count} items came {taken}", "lost")
            return [item for _, item in taken]

        self._settle(entry, call)

    def _hasty(self) -> None:
        entry, terms = self._open("collective")
        limit, work = self._chance.uniform(0.0, 0.01), self._work(entry)
        made = partial(self._ex.collective_rpc, "work", limit, work, **terms)
        self._settle(entry, made, may_expire=True)

    def _scatter(self) -> None:
        entry, terms = self._open("collective")
        loads = [f"for {rank}" for rank in range(self._ex.world_size)]

        def call() -> Any:
            each = [(entry.token, 0.0, load) for load in loads]
            values = self._ex.scatter("work", args=each, **terms, timeout=WAIT)
            if [load for _, load in values] != loads:
                self._books.report_error(entry, f"{loads} came back as {values}", "swapped")
            return values

        self._settle(entry, call)

    def _tell(self) -> None:
        entry, _ = self._open("tell", may_retry=False)
        rank = self._chance.choice([None, self._chance.randrange(min(SIZES))])
        self._ex.tell("work", args=self._work(entry), rank=rank)
        self._settle(entry, list[Any])

    def _settle(
        self,
        entry: Entry,
        call: Callable[[], Any],
        load: Any = None,
        *,
        numbers: list[int] | None = None,
        may_expire: bool = False,
    ) -> None:
        """Make the call and note its outcome; a call of *load* must have that come back."""
        try:
            values = call()
        except Exception as error:  # whatever it is, it is accounted for
            self._fail(entry, error, may_expire=may_expire)
            return
        entry.answers.extend(answer for answer, _ in values)
        backs = [back for _, back in values]
        if (load is not None and set(backs) != {load}) or (numbers not in (None, backs)):
            self._books.report_error(entry, f"came back with {str(backs)[:200]}", "lost")
        entry.outcomes.append("ok")

    def _fail(self, entry: Entry, error: Exception, *, may_expire: bool = False) -> None:
        outcome = type(error).__name__
        if isinstance(error, WorkerDied):
            if len(error.reports) != entry.retries + 1:
                told = f"died with {len(error.reports)} reports, which are its attempts"
                self._books.report_error(entry, told)
        elif isinstance(error, CallTimeout):
            if not may_expire:
                self._books.report_error(entry, f"never came back: {error}", "hung")
        # A scatter for another size than the group has by now; a gather with a death in it.
        elif not isinstance(error, CancelledError | asyncio.CancelledError | SpecError | Partly):
            self._books.report_error(entry, f"raised {error!r}")
        entry.outcomes.append(outcome)

    async def run_async(self, over: threading.Event) -> None:
        aio = self._ex.aio
        while not over.is_set():
            shape = self._chance.choice(("collective", "gather", "single", "pool", "stream"))
            entry, terms = self._open(shape, may_retry=shape not in ("gather", "stream"))
            rank, work = self._chance.randrange(min(SIZES)), self._work(entry)
            made: Any
            match shape:
                case "collective":
                    made = aio.collective_rpc("work", WAIT, work, **terms)
                case "gather":
                    made = aio.gather("work", WAIT, work)
                case "single":
                    made = aio.call("work", WAIT, work, **terms, rank=rank)
                case "pool":
                    made = aio.submit("work", args=work, timeout=WAIT, **terms)
                case _:
                    made = _items(aio.stream("items", WAIT, (entry.token, 5), rank=rank))
            if self._chance.random() < 0.1:
                made = asyncio.wait_for(made, self._chance.uniform(0.0, 0.01))
            try:
                values = await made
                values = _whole(values) if shape == "gather" else values
            except TimeoutError as error:  # CallTimeout is one
                late = error if isinstance(error, CallTimeout) else CancelledError()
                self._fail(entry, late)
            except Exception as error:
                self._fail(entry, error)
            else:
                values = [values] if shape in ("single", "pool") else values
                self._settle(entry, lambda: values)  # noqa: B023  # called at once


class Partly(Exception):
    """A gather in which a rank died."""


def _whole(outcomes: Any) -> list[Any]:
    if not all(outcome.ok for outcome in outcomes):
        assert all(o.ok or isinstance(o.error, WorkerDied) for o in outcomes), outcomes
        raise Partly
    return [outcome.value for outcome in outcomes]


async def _items(stream: Any) -> list[Any]:
    with stream:
        return [item async for item in stream]
