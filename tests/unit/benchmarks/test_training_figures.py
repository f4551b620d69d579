"""The figures of a training run follow from its notes alone."""

from __future__ import annotations

from argparse import Namespace

import pytest
from benchmarks.training.figures import Found, begun_again, digest_at, evaluate, stall
from benchmarks.training.ranks.model import BATCH, samples_of
from benchmarks.training.ranks.notes import Note
from benchmarks.training.table import render

RANKS = 2


def done(
    rank: int, step: int, at: float, *, parts: tuple[int, ...] = (0, 1), began: float | None = None
) -> list[Note]:
    """Return the notes of a step of one second that the ranks *parts* took part in."""
    begin = at - 1 if began is None else began
    used = [
        each if part in parts else 0
        for part in range(RANKS)
        for each in samples_of(step, part, RANKS)
    ]
    more = tuple(map(str, (begin, *used)))
    return [Note("begin", rank, 1, step, begin, ()), Note("done", rank, 1, step, at, more)]


def resumed(step: int, at: float) -> Note:
    return Note("from", 0, 2, step, at, ())


def found(notes: list[Note], killed: list[float], began: float, ended: float) -> Found:
    result = Found("one", RANKS)
    evaluate(result, notes, killed, began, ended)
    return result


def test_steps_after_a_checkpoint_are_done_again_and_count_once() -> None:
    notes = [note for step in range(1, 7) for note in done(0, step, float(step))]
    notes += [Note("begin", 0, 1, 7, 6.0, ()), resumed(4, 8.0)]
    notes += [note for step in range(5, 9) for note in done(0, step, step + 5.0)]

    result = found(notes, [6.5], 3.0, 13.0)

    assert (result.steps, result.last, result.redone) == (5, 8, 3)  # 4, and 5 to 8 once
    assert result.step == 1.0
    assert result.ettr == pytest.approx(0.5)
    assert result.stalls == [10.0 - 6.5 - 1.0]
    assert (result.lost, result.doubled) == (0, 0)


def test_a_step_is_timed_where_there_are_kills_and_none_fell_into_it() -> None:
    before = [note for step in range(1, 4) for note in done(0, step, step * 9.0)]
    during = [note for step in range(4, 9) for note in done(0, step, 27.0 + (step - 3) * 2.0)]
    after = done(0, 9, 57.0)  # a kill at 40 and its stall lie between

    result = found([*before, *during, *after], [40.0], 27.0, 57.0)

    assert result.step == 2.0
    assert result.ettr == pytest.approx(6 * 2.0 / 30.0)


def test_a_machine_that_becomes_slower_makes_progress_all_the_same() -> None:
    ends = [1.0, 2.0, 3.0, 4.0, 7.0, 10.0, 13.0]
    notes = [note for step, at in enumerate(ends, 1) for note in done(0, step, at)]

    result = found(notes, [], 1.0, 13.0)

    assert (result.step, result.ettr) == (2.0, 1.0)


def test_a_step_that_only_some_took_part_in_has_lost_the_samples_of_the_others() -> None:
    notes = [*done(0, 1, 1.0), *done(0, 2, 2.0, parts=(0,)), *done(0, 3, 3.0)]

    result = found(notes, [], 0.5, 3.0)

    assert (result.lost, result.doubled) == (BATCH, 0)


def test_samples_of_another_step_are_doubled_and_lost() -> None:
    one, other = done(0, 1, 1.0), done(0, 2, 2.0)
    other[1] = Note("done", 0, 1, 2, 2.0, one[1].more)

    result = found([*one, *other], [], 0.5, 3.0)

    assert (result.lost, result.doubled) == (2 * BATCH, 2 * BATCH)


def test_a_step_that_one_rank_began_twice_and_another_once_was_done_again_once() -> None:
    notes = [*done(0, 1, 1.0), Note("begin", 1, 3, 2, 1.0, ()), *done(0, 2, 2.0), *done(0, 2, 5.0)]

    assert begun_again(notes) == 1


def test_what_was_under_way_at_the_kill_does_not_end_the_stall() -> None:
    notes = [*done(1, 2, 10.3, began=9.9), *done(0, 3, 12.5, began=11.0)]

    assert stall(notes, killed=10.0, step=0.5) == pytest.approx(2.0)
    assert stall(notes, killed=13.0, step=0.5) is None


def test_a_digest_on_which_ranks_differ_is_none() -> None:
    notes = [Note("digest", rank, 1, 4, 1.0, (value,)) for rank, value in enumerate("ab")]

    assert digest_at(notes[:1], 4) == "a"
    assert digest_at(notes, 4) is None
    assert digest_at(notes, 5) is None


def test_the_cost_of_a_system_is_told_though_no_step_fell_into_the_time_with_kills() -> None:
    names = ("cadence", "seconds", "seed", "width", "layers", "rounds", "block", "reserves")
    asked = Namespace(**dict.fromkeys((*names, "patience", "every"), 1))
    given_up = Found("one", RANKS, overhead=[0.01, 0.02, 0.03], why="no step for 150 s")

    row = render([given_up], asked).splitlines()[2]

    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[-2:] == ["2.00 (1.00 to 3.00)", "see below"]
    assert set(cells[2:-2]) == {"-"}
