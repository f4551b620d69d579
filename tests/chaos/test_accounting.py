"""Every call under kills, restarts and resizes, accounted for by files that the workers write.

``make accounts`` makes 100,000 calls; ``--calls N --seed S`` as many as wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.call_books import SIZES, WAIT, Booked, Books, Caller
from tests.support.options import Make

from phalanx.actors import Executor
from phalanx.supervision import Intensity, Strategy

CALLERS, TASKS = 8, 8
SHORT = 1500  # calls of the test that is no soak; it ends early on a busy machine
LONGEST = 900.0  # seconds; on two processors 25,000 calls take less than two minutes
LONGEST_START = 10.0
LONG = [pytest.mark.soak, pytest.mark.timeout(1200)]


def kill_ranks(ex: Executor[Any], chance: random.Random, until: Callable[[], bool]) -> int:
    """Kill 2 to 8 ranks a second, mostly of a group that serves; return how many."""
    killed = 0
    while not until():
        time.sleep(chance.uniform(1 / 8, 1 / 2))
        limit = time.monotonic() + (LONGEST_START if chance.random() < 0.8 else 0.0)
        while ex.status().state != "serving" and time.monotonic() < limit:
            time.sleep(0.01)  # else a busy machine, on which starts take longer, never serves
        info = chance.choice(ex.ranks)
        if info.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGKILL)  # not collected before its exit is handled
                killed += 1
    return killed


def change(ex: Executor[Any], chance: random.Random, over: threading.Event) -> None:
    """Restart ranks, change their number and drain until *over*."""
    while not over.wait(chance.uniform(0.1, 1.5)):
        with contextlib.suppress(TimeoutError):  # it took too long, with kills all the while
            match chance.randrange(4):
                case 0:
                    ex.restart(chance.randrange(min(SIZES)), timeout=WAIT)
                case 1:
                    ex.restart(timeout=WAIT)
                case 2:
                    ex.resize(chance.choice(SIZES), timeout=WAIT)
                case _:
                    ex.drain(timeout=1.0)  # of calls that do not cease


@pytest.mark.both_transports
@pytest.mark.parametrize(
    ("own", "strategy"),
    [
        (SHORT, Strategy.ONE_FOR_ONE),
        pytest.param(25_000, Strategy.ONE_FOR_ONE, marks=LONG),
        pytest.param(25_000, Strategy.ONE_FOR_ALL, marks=LONG),
    ],
)
def test_under_kills_and_planned_changes_every_call_of_every_shape_is_accounted_for(
    make: Make,
    tmp_path: Path,
    strategy: Strategy,
    own: int,
    request: pytest.FixtureRequest,
    seed: int,
) -> None:
    calls = int(request.config.getoption("--calls") or own)
    unlimited = Intensity(1_000_000, 60.0)
    ex = make(Booked, 3, args=(str(tmp_path),), strategy=strategy, intensity=unlimited)
    books, over = Books(tmp_path), threading.Event()
    callers = [Caller(ex, books, number, seed) for number in range(CALLERS + TASKS)]

    async def run_tasks() -> None:
        await asyncio.gather(*(caller.run_async(over) for caller in callers[CALLERS:]))

    runs: list[Callable[[], object]] = [partial(each.run, over) for each in callers[:CALLERS]]
    runs.append(lambda: asyncio.run(run_tasks()))
    runs.append(partial(change, ex, random.Random(f"{seed}/change"), over))
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    limit = time.monotonic() + (LONGEST if calls > SHORT else 40.0)
    for thread in threads:
        thread.start()
    try:
        killed = kill_ranks(
            ex,
            random.Random(f"{seed}/kills"),
            lambda: time.monotonic() > limit or len(books.entries) >= calls,
        )
    finally:
        over.set()
        for thread in threads:
            thread.join(2 * WAIT)
    books.sums["hung"] += sum(thread.is_alive() for thread in threads)
    books.audit()
    status = ex.status()
    outcomes = Counter(outcome for entry in books.entries.values() for outcome in entry.outcomes)
    figures = {"seed": seed, "kills": killed, "calls": len(books.entries), "outcomes": outcomes}
    print(json.dumps({**figures, "restarts": status.restarts, "epoch": status.epoch, **books.sums}))
    assert not books.wrong, f"{len(books.wrong)} discrepancies, seed {seed}: {books.wrong[:20]}"
    assert not any(books.sums.values())
    assert (status.in_flight, status.waiting) == (0, 0)
    assert status.restarts > 0
    assert calls <= SHORT or len(books.entries) >= calls
