"""The wall clock jumps by an hour, and nothing phalanx does goes by it.

Each test is made twice: with the product as it is, and with one that lives by the wall clock, which
must be seen to fail.
"""

from __future__ import annotations

import calendar
import datetime as dt
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import time as taken_by_name
from typing import Any

import pytest
from tests.actors.workers import Echo, wait_for
from tests.chaos import targets
from tests.chaos.clocks import jumping, live_by_the_wall_clock
from tests.chaos.deeds import LONG, kill, wait_for_view, wait_healed, wait_until
from tests.chaos.links import wait_running

from phalanx.actors import Executor
from phalanx.chaos import Aim, Schedule, Strike, run_chaos
from phalanx.chaos.referee_records import Struck
from phalanx.chaos.wall_clock import HOUR, Jump, put_wall_clock
from phalanx.supervision import BackOff, CallTimeout, Intensity, Phase, WorkerDied

Make = Callable[..., Executor[Any]]
SOON = 1.0  # seconds in which what a clock set back puts off has not come

REAL = (time.time, dt.datetime.__dict__["now"])

pytestmark = pytest.mark.timeout(180)
both = pytest.mark.parametrize("right", [True, False], ids=["right", "by the wall clock"])


def opened(worker: Echo, gates: list[str]) -> int:
    wait_for(gates[worker.ctx.rank], LONG)
    return worker.ctx.rank


def ending(future: Any) -> threading.Event:
    """What is set when *future* has its outcome."""
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    return ended


def jump(_worker: Echo, ahead: float, right: bool) -> None:
    if not right:
        live_by_the_wall_clock(pytest.MonkeyPatch())
    put_wall_clock(ahead)


# --- the clock itself ---------------------------------------------------------------------


def off_by(file: Path) -> list[float]:
    """How far off the wall clock is, in minutes, by all that tell it; the kernel is right."""
    told = [
        time.time(),
        time.time_ns() / 1e9,
        taken_by_name(),
        time.clock_gettime(time.CLOCK_REALTIME),
        time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
        time.mktime(time.localtime()),
        calendar.timegm(time.gmtime()),
        time.mktime(time.strptime(time.ctime())),
        time.mktime(time.strptime(time.asctime())),
        time.mktime(time.strptime(time.strftime("%c"), "%c")),
        dt.datetime.now(dt.UTC).timestamp(),
        dt.datetime.now().timestamp(),  # noqa: DTZ005  # to be asked in every way
        dt.datetime.today().timestamp(),  # noqa: DTZ002  # the same
        dt.datetime.utcnow().replace(tzinfo=dt.UTC).timestamp(),  # noqa: DTZ003  # pyright: ignore[reportDeprecated]  # the same
    ]
    file.touch()
    return [round((each - file.stat().st_mtime) / 60) for each in told]


@pytest.mark.filterwarnings("ignore:.*utcnow:DeprecationWarning")
@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_all_that_tell_the_time_of_day_are_off_and_then_right(tmp_path: Path, ahead: float) -> None:
    with jumping() as put:
        put(ahead)
        off = off_by(tmp_path / "file")
        put(0.0)

        assert set(off) == {ahead / 60}
        assert set(off_by(tmp_path / "file")) == {0}
        assert (time.time, dt.datetime.__dict__["now"]) == REAL


def test_the_monotonic_clock_does_not_jump() -> None:
    with jumping() as put:
        before = time.monotonic(), time.clock_gettime(time.CLOCK_MONOTONIC), time.perf_counter()
        put(HOUR)
        after = time.monotonic(), time.clock_gettime(time.CLOCK_MONOTONIC), time.perf_counter()

    assert all(b <= a < b + LONG for b, a in zip(before, after, strict=True))


def test_a_jump_is_ahead_and_behind_and_over_by_itself_or_when_it_is_ended() -> None:
    seen: list[int] = []

    def note() -> bool:
        off = round((time.time() - before - (time.monotonic() - began)) / 60)
        if seen[-1:] != [off]:
            seen.append(off)
        return off == 0

    before, began = time.time(), time.monotonic()
    jump = Jump(0.4)
    jump.start()
    wait_until(note)
    assert seen == [60, -60, 0]

    long = Jump(2 * HOUR)
    long.start()
    note()
    long.end()
    note()
    jump.end()
    assert seen == [60, -60, 0, 60, 0]


# --- in the driver ------------------------------------------------------------------------


@both
def test_a_call_has_all_its_time_where_the_clock_jumps_ahead(
    make: Make, tmp_path: Path, right: bool
) -> None:
    ex = make()
    gates = [str(tmp_path / str(rank)) for rank in range(2)]
    future = ex.collective_rpc(opened, timeout=LONG, args=(gates,), non_block=True)
    wait_running(ex, 0, 1)

    with jumping(right=right) as put:
        put(HOUR)
        for _ in range(
            2
        ):  # who sees to deadlines has looked at the clock once it comes round again
            round_again = threading.Event()
            ex._core.runtime.hub.post(round_again.set)
            assert round_again.wait(LONG)
        for gate in gates:
            Path(gate).touch()
        error = future.exception(LONG)

    assert (error is None) is right


@both
@pytest.mark.parametrize("options", [{"timeout": 0.5}, {}], ids=["deadline", "hang limit"])
def test_a_limit_comes_in_time_where_the_clock_is_set_back(
    make: Make, tmp_path: Path, options: dict[str, Any], right: bool
) -> None:
    ex = make(hang_after=None if options else 0.5)
    gates = [str(tmp_path / "gate")] * 2

    with jumping(right=right) as put:
        future = ex.collective_rpc(opened, args=(gates,), non_block=True, **options)
        wait_running(ex, 0, 1)
        ended = ending(future)
        put(-HOUR)
        in_time = ended.wait(LONG if right else SOON)
    Path(gates[0]).touch()

    assert in_time is right
    if right:
        assert isinstance(future.exception(LONG), CallTimeout if options else WorkerDied)


@both
def test_restarts_an_hour_apart_by_the_wall_clock_alone_exceed_the_intensity(
    make: Make, right: bool
) -> None:
    ex = make(intensity=Intensity(1, 600.0))

    with jumping(right=right) as put:
        kill(ex)
        wait_healed(ex, 1)
        put(HOUR)
        kill(ex)
        wait_for_view(ex, lambda view: view.phase is Phase.ENDED or view.restarts == 2)

        assert ex.is_failed is right


@both
def test_restarts_that_lie_apart_do_not_exceed_it_where_the_clock_was_set_back(
    make: Make, right: bool
) -> None:
    ex = make(intensity=Intensity(1, 0.5))

    with jumping(right=right) as put:
        kill(ex)
        wait_healed(ex, 1)
        over = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > over)
        put(-HOUR)
        kill(ex)
        wait_for_view(ex, lambda view: view.phase is Phase.ENDED or view.restarts == 2)

        assert ex.is_failed is not right


@both
def test_a_back_off_is_over_in_time_where_the_clock_is_set_back(make: Make, right: bool) -> None:
    ex = make(backoff=BackOff(initial=0.5, jitter=0.0))

    with jumping(right=right) as put:
        kill(ex)
        wait_for_view(ex, lambda view: view.phase is Phase.WAITING)
        put(-HOUR)
        served = ending(ex.collective_rpc("rank", non_block=True))

        assert served.wait(LONG if right else SOON) is right


# --- in a worker --------------------------------------------------------------------------


@both
def test_a_rank_whose_clock_is_set_back_is_not_taken_for_hung(
    make: Make, tmp_path: Path, right: bool
) -> None:
    ex = make(hang_after=LONG)
    gates = [str(tmp_path / "gate")] * 2
    ex.call(0, jump, None, (-HOUR, right))

    future = ex.collective_rpc(opened, args=(gates,), non_block=True)
    wait_running(ex, 0, 1)
    ex._core.shared.watch.wake(0.1)
    killed = ending(future).wait(SOON)
    Path(gates[0]).touch()

    assert killed is not right
    assert (future.exception(LONG) is None) is right


def test_what_a_worker_tells_is_in_order_whatever_its_clock_says(make: Make) -> None:
    ex = make()
    deaths = [ex.ranks[0].pid]
    for ahead in (HOUR, -HOUR):
        ex.call(0, jump, None, (ahead, True))
        kill(ex)
        wait_healed(ex, len(deaths))
        deaths.append(ex.ranks[0].pid)

    reports = [each for each in ex._core.shared.view.reports if each.rank == 0]
    assert [each.pid for each in reports] == deaths[:2]
    assert [each.at_monotonic for each in reports] == sorted(each.at_monotonic for each in reports)


# --- as a fault ---------------------------------------------------------------------------


def at(*aims: str, gap: float = 0.8, seconds: float = 0.8) -> Schedule:
    strikes = []
    for number, aim in enumerate(map(Aim.of, aims), 1):
        strikes.append(
            Strike(
                number=number,
                at=0.2 + gap * number,
                fault=aim.fault,
                target=aim.target or "random",
                point=aim.point or "",
                seconds=seconds,
            )
        )
    return Schedule(tuple(strikes))


def test_runs_hold_where_the_clocks_of_ranks_and_of_the_driver_jump() -> None:
    aims = ("clock:driver", "clock:0", "clock:group@running", "kill:0", "clock:driver@restarting")
    schedule = at(*aims, "clock:1@after_reply")

    result = run_chaos(targets.one_for_one, duration=6.5, schedule=schedule, seed=3)

    assert result.violations == ()
    done = {(each.fault, each.target, each.point) for each in result.history.every(Struck)}
    assert done >= {(each.fault, each.target, each.point) for each in schedule}


@pytest.mark.soak
@both
def test_a_product_that_counts_by_the_wall_clock_is_found_out(tmp_path: Path, right: bool) -> None:
    schedule = at("kill:0", "clock:driver", "kill:0", seconds=4 * LONG)  # ahead until the end

    result = run_chaos(
        patient if right else patient_and_wrong,
        duration=5.0,
        schedule=schedule,
        keep_intensity=True,
        record=tmp_path / "run",
    )

    broken = {violation.invariant for violation in result.violations}
    assert ("intensity" in broken) is not right
    assert not (right and broken)


def patient() -> Executor[Any]:
    return targets.build(2, intensity=Intensity(1, 600.0))


def patient_and_wrong() -> Executor[Any]:
    live_by_the_wall_clock(pytest.MonkeyPatch())
    return patient()
