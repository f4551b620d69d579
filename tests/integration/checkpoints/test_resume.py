"""States across what else may end: the driver, the executor in its tree, a full disk, survivors."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from tests.integration.checkpoints.test_checkpoints import LONG, add, die, states
from tests.integration.recovery.test_executor_trees import executor
from tests.support.checkpoint_workers import Bounded, Counter, KeptCounter
from tests.support.event_recorder import EventRecorder
from tests.support.options import Make
from tests.support.processes import start_thread, wait_until
from tests.support.rank_faults import OFTEN, kill, wait_healed
from tests.support.transport import TRANSPORT

from phalanx.actors import (
    CheckpointFailed,
    CheckpointPolicy,
    Launch,
    RestartPolicy,
    Supervisor,
    worker_child,
)
from phalanx.runtime import Runtime
from phalanx.supervision import (
    ChildSpec,
    Decider,
    Directive,
    Rule,
    Strategy,
    SupervisorSpec,
    WorkerDied,
)

USUAL = {"worker": Counter, "intensity": OFTEN}


def saver_child(runtime: Runtime, where: Path | None = None) -> ChildSpec:
    options: Any = {"launch": Launch(preload=(), transport=TRANSPORT), "runtime": runtime}
    policy = CheckpointPolicy(every_calls=1, where=where)
    return worker_child("saver", Counter, checkpoint=policy, **options)


def test_a_killed_driver_loses_no_answered_call(tmp_path: Path) -> None:
    folder = str(tmp_path / "states")
    script = Path(__file__).parents[2] / "support/checkpoint_driver.py"
    program = [sys.executable, str(script), folder]
    driver = subprocess.Popen([*program, "100000"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    for _ in range(25):
        driver.stdout.readline()
    driver.kill()
    rest = driver.stdout.read().split()
    driver.wait()
    driver.stdout.close()
    answered = int(rest[-1]) if rest else 24

    done = subprocess.run([*program, "0"], capture_output=True, text=True, timeout=60, check=True)

    first, second = done.stdout.split()
    assert first == second
    assert int(first) in (answered, answered + 1)  # the one under way may have been stored
    assert all(path.name.startswith("cut-") for path in Path(folder).iterdir())


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.ONE_FOR_ONE])
def test_what_a_caller_was_told_has_died_is_not_in_the_folder_any_more(
    make: Make, tmp_path: Path, strategy: Strategy
) -> None:
    folder = tmp_path / "states"
    ex = make(strategy=strategy, checkpoint=CheckpointPolicy(every_calls=1, where=folder))
    add(ex)

    with pytest.raises(WorkerDied):
        ex.collective_rpc("add_and_die_answering", LONG, (0,))
    left = list(folder.glob("cut-*.rank-0-of-2"))

    assert [path.name for path in left] == ["cut-000000000001.rank-0-of-2"]


def test_kept_survivors_go_on_and_the_dead_rank_is_given_back_its_own_state(
    make: Make, torch_runtime: Runtime
) -> None:
    ex = make(
        KeptCounter,
        3,
        policy=RestartPolicy(survivors="keep"),
        launch={"preload": ("torch",)},
        runtime=torch_runtime,
        checkpoint=CheckpointPolicy(every_calls=2),
    )
    add(ex, 3)

    die(ex, 1)

    assert states(ex) == [(3, [], 1), (2, [2], 2), (3, [], 1)]
    ex.collective_rpc("add", LONG)  # the fifth; the cut was due with the fourth, which asked
    die(ex, 0)
    assert [count for count, _, _ in states(ex)] == [3, 3, 4]


def test_the_state_behind_an_error_that_ends_its_worker_is_not_given_back(make: Make) -> None:
    decider = Decider((Rule(ArithmeticError, Directive.RESTART),))
    ex = make(checkpoint=CheckpointPolicy(every_calls=1), policy=RestartPolicy(decider=decider))
    add(ex)

    with pytest.raises(ArithmeticError):
        ex.collective_rpc("add_and_raise", LONG, (ArithmeticError("spoilt"),))
    wait_healed(ex, 1)
    assert [count for count, _, _ in states(ex)] == [1, 1]
    with pytest.raises(KeyError):
        ex.collective_rpc("add_and_raise", LONG, (KeyError("not so bad"),))
    # The first to raise has ended the call; the other may have yet to begin it.
    wait_until(lambda: not any(slot.sent for slot in ex._group.plane._table))
    die(ex, 0)

    assert [count for count, _, _ in states(ex)] == [2, 2]


def test_a_worker_child_goes_on_when_its_supervisor_starts_it_anew(
    tmp_path: Path, runtime: Runtime
) -> None:
    child = saver_child(runtime, where=tmp_path / "states")
    with Supervisor(SupervisorSpec("root", children=[child], intensity=OFTEN)) as tree:
        for number in range(1, 4):
            ex = executor(tree, "saver")
            assert ex.call("add", LONG, rank=0) == number
            kill(ex, 0)
            assert ex.wait_closed(LONG)

        assert executor(tree, "saver").call("state", LONG, rank=0)[:2] == (3, [3])


def test_the_states_of_instances_that_are_gone_are_given_back(runtime: Runtime) -> None:
    saver = saver_child(runtime)
    with Supervisor(SupervisorSpec("root", Strategy.DYNAMIC)) as tree:
        kept: list[weakref.ref[Any]] = []
        for _ in range(3):
            key = tree.start_child(saver, timeout=LONG)
            assert key is not None
            assert executor(tree, key).call("add", LONG, rank=0) == 1  # it goes on from no other
            kept.append(weakref.ref(executor(tree, key)._group.checkpoints))
            tree.terminate_child(key, timeout=LONG)
        tree.start_child(saver, timeout=LONG)

        wait_until(lambda: gc.collect() >= 0 and [each() for each in kept] == [None] * 3)


def test_two_trees_of_one_spec_leave_each_other_alone_and_keep_their_states_apart(
    runtime: Runtime,
) -> None:
    spec = SupervisorSpec("root", children=[saver_child(runtime)], intensity=OFTEN)
    with Supervisor(spec) as one, Supervisor(spec) as other:
        first, before = executor(one, "saver"), executor(other, "saver")
        assert first.name == before.name == "root/saver"
        for number in range(1, 4):
            assert first.call("add", LONG, rank=0) == number
        assert before.call("add", LONG, rank=0) == 1
        kill(before, 0)
        wait_until(lambda: executor(other, "saver") is not before)

        assert executor(other, "saver").call("add", LONG, rank=0) == 2
        assert executor(one, "saver") is first
        assert first.call("add", LONG, rank=0) == 4


def test_a_full_disk_costs_snapshots_and_nothing_else(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    ex = make(Bounded, checkpoint=CheckpointPolicy(every_calls=1, where=folder))
    failed = EventRecorder(ex, CheckpointFailed)
    ex.collective_rpc("add", LONG)
    ex.collective_rpc("fill_disk", LONG)

    assert ex.collective_rpc("add", LONG) == [2, 2]
    assert "File too large" in failed.wait()[0].error
    with pytest.raises(OSError, match="File too large"):
        ex.checkpoint(LONG)
    die(ex, 0)
    assert ex.collective_rpc("get", LONG) == [1, 1]

    assert all(path.name.startswith("cut-") for path in folder.iterdir())


@pytest.mark.parametrize(("kills", "seed"), [(6, 1), pytest.param(150, 2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.ONE_FOR_ONE])
def test_counts_are_exact_under_random_kills(
    make: Make, tmp_path: Path, kills: int, seed: int, strategy: Strategy
) -> None:
    """Every call is made again until it is answered, and is in the state once."""
    dice = random.Random(seed)
    policy = CheckpointPolicy(every_calls=1, where=tmp_path / "states")
    ex = make(world_size=3, strategy=strategy, checkpoint=policy)
    ending = threading.Event()

    def strike() -> None:
        for number in range(kills):
            if ending.is_set():
                return
            kill(ex, dice.randrange(3))
            wait_healed(ex, number + 1)
            time.sleep(dice.random() * 0.02)

    killer = start_thread(strike)
    done = 0
    while killer.is_alive():
        done += 1
        values = ex.collective_rpc("add", LONG, retries=100)
        if strategy is Strategy.ONE_FOR_ALL:
            assert values == [done] * 3
        else:  # a survivor's count has what it ran again
            assert min(values) >= done
    ending.set()
    killer.join(LONG)

    assert ex.status().restarts == kills
    if strategy is Strategy.ONE_FOR_ALL:
        assert ex.collective_rpc("get", LONG, retries=1) == [done] * 3
