"""Training through kills: the state at the end is that of the undisturbed run, byte for byte."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training_workers import (
    BATCH,
    SAMPLES,
    Accumulating,
    Apart,
    Broadcasting,
    Calling,
    Centering,
    Compressing,
    Counting,
    Drifting,
    Dying,
    Evaluating,
    FailingBackward,
    FailingShards,
    Fault,
    Full,
    Growing,
    Holding,
    Hooked,
    Initializing,
    Late,
    Lazy,
    Meeting,
    Minimizing,
    Mixing,
    Nesting,
    Outside,
    Paired,
    Plateau,
    Rejoining,
    Remembering,
    Renaming,
    Replacing,
    Replicated,
    Reshuffling,
    Scaling,
    Scripting,
    Sharded,
    Stateless,
    Stepwise,
    Teaching,
    TensorParallel,
    Unfreezing,
    Unseen,
    Working,
)

from phalanx.actors import Launch, Limits, RestartPolicy
from phalanx.integrations.torch import (
    HiddenState,
    ShapeChanged,
    Trainer,
    Training,
    TrainingError,
    WorldSizeChanged,
)
from phalanx.supervision import Intensity, PhalanxError, SpecError, StartFailed, Strategy

pytestmark = pytest.mark.timeout(300)
STEPS = 8
OFTEN = Intensity(1000, 60.0)
DRIVE = [sys.executable, str(Path(__file__).parents[2] / "support" / "training_driver.py")]


def train(
    trainer: type[Trainer],
    ranks: int,
    *,
    steps: int = STEPS,
    faults: Sequence[Fault] = (),
    marks: Path | str = "",
    survivors: Any = "keep",
    **options: Any,
) -> tuple[str, list[Any], Training[Any]]:
    """Return the digest after *steps*, the results by step, and the run, closed."""
    policy = RestartPolicy(survivors=survivors, intensity=OFTEN, leave_within=4.0)
    with Training(
        trainer,
        ranks,
        args=(faults, str(marks)),
        sharded=issubclass(trainer, Sharded),
        policy=policy,
        threads=1,
        **options,
    ) as run:
        results = [step.result for step in run.steps(steps)]
        return run.digest(), results, run


@cache
def undisturbed(trainer: type[Trainer], ranks: int, steps: int = STEPS) -> tuple[str, list[Any]]:
    return train(trainer, ranks, steps=steps)[:2]


def check_samples(results: list[Any], ranks: int) -> None:
    """Each sample of an epoch is used once."""
    used = [int(sample) for rows in results for row in rows for sample in row[1:]]
    assert len(used) == len(results) * ranks * BATCH <= SAMPLES
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("survivors", ["keep", "restart"])
def test_two_ranks_killed_or_stopped_at_every_moment_of_a_step_end_as_if_undisturbed(
    tmp_path: Path, survivors: str
) -> None:
    faults = [
        (1, 1, "begin"),
        (0, 2, "backward"),
        (1, 3, "applied"),
        (1, 4, "writing"),
        (0, 5, "begin"),
        (1, 5, "begin"),  # all at once
        (0, 6, "writing"),
        (1, 7, "stopped"),
        (1, 3, "joining"),  # in the re-formation after the second death
    ]
    limits = Limits(stopped=0.5)
    options: dict[str, Any] = {"survivors": survivors, "every": 1, "limits": limits}
    digest, results, run = train(Replicated, 2, faults=faults, marks=tmp_path, **options)

    assert (digest, results) == undisturbed(Replicated, 2)
    check_samples(results, 2)
    assert len(list(tmp_path.iterdir())) == len(faults)
    assert all(each.redone <= 1 for each in run.resumed)


@pytest.mark.parametrize("trainer", [Sharded, pytest.param(TensorParallel, marks=pytest.mark.soak)])
def test_sharded_ranks_get_their_own_shards_back(tmp_path: Path, trainer: Any) -> None:
    faults = [
        (1, 2, "begin"),
        (0, 3, "applied"),
        (1, 4, "writing"),
        (0, 6, "backward"),
        (1, 6, "backward"),
        (0, 3, "joining"),
    ]
    digest, results, _ = train(trainer, 2, faults=faults, marks=tmp_path)

    assert (digest, results) == undisturbed(trainer, 2)
    assert len(list(tmp_path.iterdir())) == len(faults)


def test_a_step_that_fails_after_its_parameters_were_changed_is_taken_from_the_buffers(
    tmp_path: Path,
) -> None:
    digest, results, run = train(
        Stepwise, 2, faults=[(1, 3, "backward"), (0, 5, "applied")], marks=tmp_path
    )

    assert (digest, results) == undisturbed(Replicated, 2)
    assert run.resumed


@pytest.mark.parametrize("again", [[], [(1, 2, "joining")]])
def test_what_an_interrupted_step_has_left_is_no_hidden_state(
    tmp_path: Path, again: list[Fault]
) -> None:
    faults = [(1, 3, "backward"), *again]
    digest, results, _ = train(Accumulating, 2, faults=faults, marks=tmp_path)

    assert (digest, results) == undisturbed(Accumulating, 2)


def test_what_a_step_has_made_ends_with_the_model_of_a_survivor(tmp_path: Path) -> None:
    digest, results, _ = train(Holding, 2, faults=[(1, 3, "begin")], marks=tmp_path)

    assert (digest, results) == undisturbed(Sharded, 2)


@pytest.mark.parametrize("trainer", [Unfreezing, Paired])
def test_what_ddp_was_made_of_is_the_same_after_a_death(tmp_path: Path, trainer: Any) -> None:
    digest, results, _ = train(trainer, 3, faults=[(1, 3, "begin")], marks=tmp_path)

    assert (digest, results) == undisturbed(trainer, 3)


def test_ddp_that_sends_state_is_refused_where_each_rank_has_its_own() -> None:
    with pytest.raises(StartFailed) as caught:
        Training(Broadcasting, 1, threads=1, sharded=True)

    assert "net: make it by replicate(...)" in str(caught.value.__cause__)


def test_a_digest_and_a_call_are_of_the_last_step_though_all_go_back_to_the_buffers() -> None:
    with Training(Replicated, 2, args=([], ""), threads=1) as run:
        list(run.steps(3))
        for ask, expected in (
            (run.digest, undisturbed(Replicated, 2, 3)[0]),
            (lambda: run.call("position"), 3),
        ):
            for rank in run.executor.ranks:
                assert rank.pid is not None
                os.kill(rank.pid, signal.SIGKILL)
            assert ask() == expected
        assert [each.source for each in run.resumed] == ["buffers"] * 2
        with pytest.raises(SpecError, match="method='weights': Replicated has no such method"):
            run.call("weights")


def test_steps_that_are_done_again_have_a_limit_each() -> None:
    policy = RestartPolicy(survivors="keep", intensity=Intensity(1, 60.0))
    with Training(
        Working, 1, args=([], ""), threads=1, every=9, policy=policy, limits=Limits(hang=1.0)
    ) as run:
        list(run.steps(5))
        pid = run.executor.ranks[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        list(run.steps(6))

        assert [each.redone for each in run.resumed] == [5]


def test_three_ranks_add_in_the_same_order_after_a_death(tmp_path: Path) -> None:
    digest, results, _ = train(Unseen, 3, faults=[(1, 3, "begin")], marks=tmp_path, steps=5)

    assert (digest, results) == undisturbed(Unseen, 3, 5)


def test_gradients_travel_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    train(Hooked, 2, marks=tmp_path, steps=3)

    for rank in (0, 1):
        buckets = (tmp_path / f"buckets-{rank}").read_text().splitlines()
        of_one = buckets[: len(buckets) // 3]
        assert buckets == of_one * 3, "from the first step on"
        order = [int(place) for bucket in of_one for place in bucket.split()]
        assert len(of_one) > 2
        assert order == sorted(order, reverse=True), "the last parameters first"


def test_no_room_after_a_death_does_not_end_the_run(tmp_path: Path) -> None:
    digest, _, run = train(Full, 2, faults=[(1, 6, "begin")], marks=tmp_path)

    assert digest == undisturbed(Replicated, 2)[0]
    assert [each.source for each in run.resumed] == ["memory"]


def test_buffers_every_three_steps_have_at_most_three_done_again(tmp_path: Path) -> None:
    faults = [(0, 6, "begin"), (1, 6, "begin")]
    digest, results, run = train(Replicated, 2, faults=faults, marks=tmp_path, every=3)

    assert (digest, results) == undisturbed(Replicated, 2)
    assert [each.redone for each in run.resumed] == [3]


BOTH = [(0, 4, "raising"), (1, 4, "raising")]


@pytest.mark.parametrize(
    ("trainer", "faults", "told"),
    [
        (Replicated, BOTH, "step 4 on rank"),
        (Replicated, [(0, 4, "raising late")], "step 4 on rank 0"),  # rank 1 has done it
        (FailingBackward, BOTH, "in the backward pass"),
        (FailingShards, BOTH, "in the backward pass"),
    ],
)
def test_a_step_that_raises_is_as_if_it_had_not_begun(
    tmp_path: Path, trainer: type[Trainer], faults: list[Fault], told: str
) -> None:
    options: dict[str, Any] = {"args": (faults, str(tmp_path)), "threads": 1, "timeout": 10.0}
    is_sharded = issubclass(trainer, Sharded)
    with Training(trainer, 2, sharded=is_sharded, **options) as run:
        with pytest.raises(ValueError, match=told):
            list(run.steps(STEPS))
        assert run.step == 3
        assert [step.number for step in run.steps(STEPS)] == [4, 5, 6, 7, 8]
        assert run.digest() == undisturbed(Sharded if is_sharded else Replicated, 2)[0]


WARM = ("torch", "torch._dynamo", "phalanx.integrations.torch")  # as for all other tests


@pytest.mark.parametrize(
    "launch",
    [
        None,
        Launch(preload=WARM),
        {"preload": WARM, "env": {"OTHER": "1"}},
        {"preload": WARM, "method": "exec"},
    ],
)
def test_sets_have_one_order_in_all_processes_of_a_run(launch: Any) -> None:
    script = "print(hash('phalanx'))"
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    expected = int(subprocess.check_output([sys.executable, "-c", script], env=env))
    with Training(Replicated, 1, threads=1, launch=launch) as run:
        assert run.executor.collective_rpc(lambda _: hash("phalanx")) == [expected]


def test_a_death_in_the_first_start_does_not_end_the_run(tmp_path: Path) -> None:
    digest, _, run = train(Dying, 2, marks=tmp_path)

    assert (tmp_path / "built 1").exists()
    assert digest == undisturbed(Replicated, 2)[0]
    assert not run.resumed  # there was nothing to go on from


def test_one_rank_alone_has_at_most_one_step_done_again(tmp_path: Path) -> None:
    digest, _, run = train(Replicated, 1, faults=[(0, 6, "begin")], marks=tmp_path)

    assert digest == undisturbed(Replicated, 1)[0]
    assert run.resumed[-1].redone == 1


@pytest.mark.parametrize(
    ("trainer", "error", "told"),
    [
        (Compressing, HiddenState, "a hook of net is a PowerSGDState, which has state"),
        (Mixing, HiddenState, "nor mixed_precision: use torch.autocast"),
        # It would be taken for replicated.
        (Sharded, TrainingError, "sharded state; give sharded=True"),
        (Meeting, ValueError, "Default process group has not been initialized"),
        (Renaming, TrainingError, "join() adds or renames model.1"),
        (Stateless, TrainingError, "build() returned dict: return a State(...)"),
        (Scaling, TrainingError, "a GradScaler needs an apply() with scaler.step(optimizer)"),
        (Plateau, TrainingError, "a ReduceLROnPlateau needs an apply() with its step(loss)"),
        (Minimizing, TrainingError, "a LBFGS needs a train_step with its step(closure)"),
        (Replacing, TrainingError, "join() replaces model.1.weight"),
        (Remembering, TrainingError, "join() adds or renames model.seen"),
        (Initializing, TrainingError, "join() changes model.5.bias: do it in build()"),
    ],
)
def test_a_trainer_whose_state_is_not_kept_is_refused_in_words(
    trainer: type[Trainer], error: type[Exception], told: str
) -> None:
    with pytest.raises(StartFailed) as caught:
        Training(trainer, 1, threads=1)

    assert type(caught.value.__cause__) is error
    assert told in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("trainer", "ranks", "done", "told"),
    [
        (Lazy, 1, 0, "batches is a _SingleProcessDataLoaderIter"),
        (Late, 1, 0, "net: wrapped in DDP by a step: wrap it in join"),
        (Teaching, 1, 0, "teacher.weight is a tensor that a step changed"),
        (Counting, 1, 0, r"count is a value that a step changed.* without_state = \('count',\)"),
        (Reshuffling, 2, 3, "epoch is a value that a step changed"),
        (Outside, 1, 1, "the optimizer that a step uses is a SGD"),
        (Nesting, 1, 1, "the optimizer that a step uses is a Adam"),
        (Apart, 2, 1, "optimizer of rank 1 is not that of rank 0"),
        (Drifting, 2, 4, "model, .* of rank 1 is not that of rank 0"),
    ],
)
def test_what_a_step_may_not_do_is_refused_before_the_step_counts(
    trainer: type[Trainer], ranks: int, done: int, told: str
) -> None:
    with Training(trainer, ranks, threads=1, every=10) as run:
        for _ in range(2):
            with pytest.raises(TrainingError, match=told):
                list(run.steps(STEPS))
        assert run.step == done


def test_modes_that_a_step_changes_are_rolled_back_and_results_may_differ_in_size(
    tmp_path: Path,
) -> None:
    calm = train(Evaluating, 2)[0]

    kept = train(Evaluating, 2, faults=[(1, 5, "evaluating")], marks=tmp_path)
    faults = [(0, 6, "begin"), (1, 6, "begin")]
    anew = train(Evaluating, 2, faults=faults, marks=tmp_path, every=1)

    assert (kept[0], anew[0]) == (calm, calm)
    assert kept[2].resumed[-1].source == "memory"
    assert anew[2].resumed[-1].source == "buffers"
    assert [len(result) for result in anew[1]] == [100] * STEPS


@pytest.mark.parametrize(("trainer", "step"), [(Rejoining, 5), (Centering, 1), (Scripting, 5)])
def test_what_join_a_failed_step_and_the_age_of_a_process_do_has_no_effect(
    tmp_path: Path, trainer: Any, step: int
) -> None:
    digest, results, run = train(trainer, 2, faults=[(1, step, "backward")], marks=tmp_path)

    assert (digest, results) == undisturbed(trainer, 2)
    assert run.resumed[-1].source == "memory"


def test_a_method_between_two_steps_leaves_the_state_as_it_is() -> None:
    with Training(Calling, 2, args=([], ""), threads=1) as run:
        list(run.steps(3))
        run.call("evaluate")
        list(run.steps(5))
        with pytest.raises(TrainingError, match=r"tune\(\) changes optimizer, between two steps"):
            run.call("tune")
        list(run.steps(STEPS))
        assert run.digest() == undisturbed(Replicated, 2)[0]


def test_a_run_that_no_process_can_take_up_ends_with_the_reason(tmp_path: Path) -> None:
    faults = [(0, 5, "begin"), (1, 5, "begin")]
    with Training(Growing, 2, args=(faults, str(tmp_path)), threads=1, every=1) as run:
        for _ in range(2):
            with pytest.raises(ShapeChanged, match="model.seen"):
                list(run.steps(STEPS))
        assert run.step == 4


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("timeout", {"timeout": -0.5}),
        ("survivors", {"survivors": "some"}),
        ("survivors", {"survivors": "keep", "policy": RestartPolicy(survivors="restart")}),
        ("policy", {"policy": "keep"}),
        ("policy.strategy", {"policy": RestartPolicy(strategy=Strategy.ONE_FOR_ONE)}),
        ("sharded", {"sharded": "yes"}),
        ("seed", {"seed": True}),
        ("args", {"args": None}),
        ("kwargs", {"kwargs": [1]}),
        ("cluster", {"cluster": object()}),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_its_name(
    option: str, more: dict[str, Any]
) -> None:
    with pytest.raises(SpecError) as refused:
        Training(Replicated, 1, **more)

    assert refused.value.field == option


def settings(_: Trainer) -> tuple[Any, ...]:
    config = torch._dynamo.config
    shapes = config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit
    return os.environ["CUBLAS_WORKSPACE_CONFIG"], *shapes


def test_a_run_in_which_torch_is_set_up_ends_with_the_reason_when_it_is_resized() -> None:
    with Training(Replicated, 2, threads=1) as run:
        assert run.executor.call(settings, rank=0) == (":4096:8", False, True)
        with pytest.raises(WorldSizeChanged):  # noqa: PT012
            with suppress(PhalanxError):
                run.executor.resize(1)
            list(run.steps(1))


def test_a_run_goes_on_from_its_folder_after_its_driver_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = [*DRIVE, str(folder), str(STEPS), "Replicated"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert next(driver.stdout) == "from 0\n"
        for line in driver.stdout:
            if line == "step 4\n":
                driver.kill()
                break
    with pytest.raises(WorldSizeChanged):
        Training(Replicated, 3, folder=folder)
    with Training(Replicated, 2, folder=folder) as run:
        assert 4 <= run.step <= STEPS
        list(run.steps(STEPS))
        assert run.digest() == undisturbed(Replicated, 2)[0]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("survivors", ["keep", "restart"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("trainer", [Replicated, Sharded])
def test_a_hundred_kills_at_random_moments_leave_no_trace(
    trainer: Any, ranks: int, survivors: Any, seed: int
) -> None:
    """One rank, two or all at once; in a step, in a start, or while ranks are formed anew."""
    steps, chance, kills = SAMPLES // (ranks * BATCH), random.Random(seed), 0
    calm = undisturbed(trainer, ranks, steps)
    policy = RestartPolicy(survivors=survivors, intensity=OFTEN, leave_within=2.0)
    signals = [signal.SIGKILL] * 9 + [signal.SIGSTOP]
    while kills < 100:
        ended, stepped = threading.Event(), threading.Event()

        def strike(
            run: Training[Any],
            ended: threading.Event = ended,
            stepped: threading.Event = stepped,
        ) -> None:
            nonlocal kills
            while not ended.wait(chance.uniform(0.0, 0.3)):
                for rank in chance.sample(range(ranks), chance.choice([1, 1, 1, 2, ranks])):
                    pid = run.executor.ranks[rank].pid
                    if pid is not None:
                        with suppress(ProcessLookupError):
                            os.kill(pid, chance.choice(signals))
                            kills += 1
                stepped.clear()
                # In a third of cases the next comes while the ranks are re-formed.
                if chance.random() < 0.7 and not ended.is_set():
                    stepped.wait()

        with Training(
            trainer,
            ranks,
            policy=policy,
            sharded=issubclass(trainer, Sharded),
            threads=1,
            limits=Limits(stopped=0.5),
        ) as run:
            killer = threading.Thread(target=strike, args=(run,))
            killer.start()
            results: list[Any] = []
            for step in run.steps(steps):
                results.append(step.result)
                stepped.set()
            ended.set()
            stepped.set()
            killer.join()
            assert (run.digest(), results) == calm, f"seed {seed}, after {kills} kills"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trainer", [Replicated, Sharded])
def test_a_driver_that_is_killed_again_and_again_goes_on_from_its_folder(
    tmp_path: Path, trainer: Any, seed: int
) -> None:
    chance, kills, steps = random.Random(seed), 0, SAMPLES // (2 * BATCH)
    calm = undisturbed(trainer, 2, steps)[0]
    for attempt in itertools.count():
        words = [*DRIVE, str(tmp_path / str(attempt)), str(steps), trainer.__name__]
        lines: list[str] = []
        while not any(line.startswith("digest") for line in lines):
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
                assert driver.stdout is not None
                due = chance.randrange(1, 8)  # lines, of which the first is where it goes on from
                lines = list(itertools.islice(driver.stdout, due))
                time.sleep(chance.uniform(0.0, 0.02))  # any moment of a step
                driver.kill()
                kills += 1
                lines += driver.stdout
        assert f"digest {calm}\n" in lines, f"seed {seed}, after {kills} kills"
        if kills >= 100:
            break
