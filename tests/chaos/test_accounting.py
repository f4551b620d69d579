"""Under any faults, every call has exactly one outcome, and what was done is what was told.

A short run belongs to the tests; ``make soak`` makes the long ones, and ``--faults N --seed S``
makes one as long as is wanted, or again as it was.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.booked import Booked, BookedTogether
from tests.chaos.books import Books
from tests.chaos.traffic import WAIT, AsyncCaller, Caller, Hand, run_async

from phalanx.actors import Executor
from phalanx.runtime import Runtime
from phalanx.supervision import Intensity, Strategy

Make = Callable[..., Executor[Any]]
CALLERS = 8
TASKS = 8
SHORT = 1500  # calls of the test that is no soak; it ends early on a busy machine
LONGEST = 900.0  # seconds; on two processors 25,000 calls take less than two minutes
KILLS = ("kill",)
SUDDEN = ("kill", "stop", "segv", "abort", "term", "interrupt")
IN_A_CALL = (
    *("raise", "raise_unpicklable", "exit", "leave", "die", "crash", "stop_self", "loop"),
    *("deadlock", "hold", "shut", "spawn", "dawdle"),
)
AT_START = ("start_raise", "start_exit", "start_die")
EVERY = (*SUDDEN, *IN_A_CALL, *AT_START)


def _nothing(_worker: object) -> None:
    """Do nothing."""


def account(
    ex: Executor[Any],
    folder: Path,
    faults: tuple[str, ...],
    times: int,
    seed: int,
    *,
    calls: int = 0,
) -> dict[str, Any]:
    """Strike *ex* that often while `CALLERS` call it; return the figures of what was right.

    With *calls* strike it 2 to 8 times a second until so many have been made, also by tasks of an
    event loop, while ranks are restarted and their number changes.
    """
    sizes = (2, 3, 4) if calls else (ex.world_size,)
    books = Books(folder, sizes)
    hand = Hand(ex, books, folder, faults, seed)
    callers = [Caller(ex, books, number, seed) for number in range(CALLERS)]
    over = threading.Event()
    runs = [partial(caller.run, over) for caller in callers]
    if calls:
        tasks = [AsyncCaller(ex, books, CALLERS + number, seed) for number in range(TASKS)]
        runs += [partial(run_async, tasks, over), partial(hand.change, over, sizes)]
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    limit = began + (LONGEST if calls > SHORT else 40.0)
    try:
        if calls:
            while time.monotonic() < limit and (len(books.entries) < calls or not hand.changed):
                hand.strike_after(1 / 8, 1 / 2)
        else:
            hand.strike(times)
    finally:
        over.set()
        for thread in threads:
            thread.join(2 * WAIT)
    took = time.monotonic() - began
    hand.rest()
    # Callbacks run one after the other on a thread of their own: this one is the last.
    heard = threading.Event()
    last = ex.collective_rpc(_nothing, WAIT, non_block=True, on_death="retry", retries=100)
    last.add_done_callback(lambda _: heard.set())
    assert heard.wait(WAIT)
    for thread in threads:
        books.sums["hung"] += thread.is_alive()
    wrong = books.audit()
    status = ex.status()
    done = sum(effect.kind == "effect" for effect in books.effects())
    figures = {
        "seed": seed,
        "seconds": round(took, 1),
        "faults": dict(sorted(hand.struck.items())),
        "planned changes": hand.changed,
        "calls": len(books.entries),
        "outcomes": dict(sorted(books.outcomes().items())),
        "effects": done,
        "restarts": status.restarts,
        "epoch": status.epoch,
        "void replies": status.dropped_replies,
        **books.sums,
    }
    print(json.dumps(figures, indent=1))
    assert not any(thread.is_alive() for thread in threads), "a call never came back"
    assert not wrong, f"{len(wrong)} discrepancies, seed {seed}: {wrong[:20]}"
    assert (status.in_flight, status.waiting) == (0, 0)
    assert status.state in ("serving", "mending")
    assert status.restarts > 0
    return figures


@pytest.mark.both_transports
@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL])
@pytest.mark.parametrize(
    "own", [SHORT, pytest.param(25_000, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
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
    ex = make(
        Booked,
        3,
        args=(str(tmp_path),),
        strategy=strategy,
        intensity=Intensity(1_000_000, 60.0),
    )

    figures = account(ex, tmp_path, KILLS, 0, seed, calls=calls)

    assert calls <= SHORT or figures["calls"] >= calls
    assert figures["calls"] > 0


WAYS: dict[str, dict[str, Any]] = {
    "one_for_one": {"strategy": Strategy.ONE_FOR_ONE},
    "one_for_all": {"strategy": Strategy.ONE_FOR_ALL},
    "rest_for_one": {"strategy": Strategy.REST_FOR_ONE},
    "with spares": {"strategy": Strategy.ONE_FOR_ONE, "standby": 2},
    "restart all": {"strategy": Strategy.ONE_FOR_ALL, "torch": True},
    "keep": {"strategy": Strategy.ONE_FOR_ALL, "survivors": "keep", "torch": True},
}


@pytest.mark.parametrize(
    ("way", "own"),
    [
        ("one_for_one", 25),
        ("keep", 8),
        *(
            pytest.param(way, 420, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])
            for way in WAYS
        ),
    ],
)
def test_under_random_faults_every_call_has_one_outcome_and_none_is_stale(
    make: Make,
    torch_runtime: Runtime,
    tmp_path: Path,
    way: str,
    own: int,
    times: Callable[[int], int],
    seed: int,
) -> None:
    options = dict(WAYS[way])
    worker: type[Booked] = Booked
    if options.pop("torch", False):
        worker = BookedTogether
        options |= {"preload": ("torch",), "runtime": torch_runtime}
    ex = make(
        worker,
        4,
        args=(str(tmp_path),),
        intensity=Intensity(1_000_000, 60.0),
        hang_after=1.0,
        stopped_after=0.5,
        leave_within=5.0,
        **options,
    )

    account(ex, tmp_path, EVERY, times(own), seed)
