"""Training through kills: the state at the end is that of the undisturbed run, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.support.training_workers import (
    BATCH,
    SAMPLES,
    Fault,
    Replicated,
    Sharded,
    Stepwise,
)

from phalanx.actors import Limits, RestartPolicy
from phalanx.integrations.torch import Trainer, Training
from phalanx.supervision import Intensity

STEPS = 8
OFTEN = Intensity(1000, 60.0)
DRIVER = Path(__file__).parents[2] / "support" / "training_driver.py"


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
def test_two_ranks_killed_at_every_moment_of_a_step_end_as_if_undisturbed(
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
        (1, 3, "joining"),  # in the re-formation after the second death
    ]
    digest, results, run = train(Replicated, 2, faults=faults, marks=tmp_path, survivors=survivors)

    assert (digest, results) == undisturbed(Replicated, 2)
    check_samples(results, 2)
    assert len(list(tmp_path.iterdir())) == len(faults)
    assert all(each.redone <= 1 for each in run.resumed)


def test_four_ranks_killed_alone_in_pairs_and_all_at_once_end_as_if_undisturbed(
    tmp_path: Path,
) -> None:
    together = [(rank, 6, "applied") for rank in range(4)]
    faults = [(2, 2, "backward"), (0, 4, "applied"), (3, 4, "begin"), *together]
    digest, results, _ = train(Replicated, 4, faults=faults, marks=tmp_path)

    assert (digest, results) == undisturbed(Replicated, 4)
    assert len(list(tmp_path.iterdir())) == len(faults)


def test_sharded_ranks_get_their_own_shards_back(tmp_path: Path) -> None:
    faults = [
        (1, 2, "begin"),
        (0, 3, "applied"),
        (1, 4, "writing"),
        (0, 6, "backward"),
        (1, 6, "backward"),
        (0, 3, "joining"),
    ]
    digest, results, _ = train(Sharded, 2, faults=faults, marks=tmp_path)

    assert (digest, results) == undisturbed(Sharded, 2)
    assert len(list(tmp_path.iterdir())) == len(faults)


def test_a_step_that_fails_after_its_parameters_were_changed_is_taken_from_the_buffers(
    tmp_path: Path,
) -> None:
    digest, results, run = train(
        Stepwise, 2, faults=[(1, 3, "backward"), (0, 5, "applied")], marks=tmp_path
    )

    assert (digest, results) == undisturbed(Replicated, 2)
    assert run.resumed


def test_a_stopped_rank_is_replaced_and_the_run_ends_as_if_undisturbed(tmp_path: Path) -> None:
    digest, results, _ = train(
        Replicated, 2, faults=[(1, 3, "stopped")], marks=tmp_path, limits=Limits(stopped=0.5)
    )

    assert (digest, results) == undisturbed(Replicated, 2)


def test_buffers_every_three_steps_have_at_most_three_done_again(tmp_path: Path) -> None:
    faults = [(0, 6, "begin"), (1, 6, "begin")]
    digest, results, run = train(Replicated, 2, faults=faults, marks=tmp_path, every=3)

    assert (digest, results) == undisturbed(Replicated, 2)
    assert [each.redone for each in run.resumed] == [3]
