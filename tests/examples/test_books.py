"""What a run says of itself is counted, and its verdict is strict."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from minilm.arguments import parse
from minilm.ledger import Ledger
from minilm.outcome import Found, Outcome
from minilm.progress import progress

RIGHT = Outcome(
    pipeline="p",
    ranks=4,
    passages=100,
    seconds=2.0,
    calls=4,
    kills_asked=3,
    kills=2,
    hits=2,
    restarts=8,
    recoveries=[0.5, 0.25],
    lost=0,
    twice=0,
    difference=3e-7,
    query="q",
    nearest=[Found(0.5, "io.open", "io.open(file): opens it")],
)


def test_calls_without_an_answer_are_in_flight_and_at_the_end_lost() -> None:
    ledger = Ledger()

    for ticket in range(3):
        ledger.made(ticket)
    ledger.answered(1)

    assert (ledger.calls, ledger.in_flight, ledger.twice) == (3, 2, 0)


def test_an_answer_matched_to_the_wrong_call_is_one_twice_and_one_lost() -> None:
    ledger = Ledger()

    for ticket in (0, 1):
        ledger.made(ticket)
        ledger.answered(0)

    assert (ledger.in_flight, ledger.twice) == (1, 1)


def test_the_pace_is_that_of_the_quickest_answer_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 14.0, 15.0, 18.0])  # it is made, and answered three times
    monkeypatch.setattr("minilm.ledger.time", SimpleNamespace(monotonic=lambda: next(clock)))
    ledger = Ledger()
    paces = [ledger.pace]

    for ticket in range(3):
        ledger.answered(ticket)
        paces.append(ledger.pace)

    assert paces == [0.0, 4.0, 1.0, 1.0]


def test_an_answer_to_no_call_counts_as_one_too_many() -> None:
    ledger = Ledger()

    ledger.answered(9)

    assert ledger.twice == 1


def test_who_waits_for_answers_is_let_go_when_the_books_are_closed() -> None:
    ledger = Ledger()
    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(ledger.wait_answered(2)))
    waiter.start()

    ledger.answered(0)
    ledger.close()

    waiter.join(10)
    assert seen == [False]


def test_a_run_in_which_all_is_right_is_ok() -> None:
    assert RIGHT.ok
    assert json.loads(RIGHT.to_json())["ok"] is True


@pytest.mark.parametrize(
    "wrong",
    [
        {"lost": 1},
        {"twice": 1},
        {"difference": 2e-4},
        {"difference": float("nan")},
        {"errors": ["e"]},
    ],
)
def test_a_run_in_which_one_thing_is_wrong_is_not(wrong: dict[str, object]) -> None:
    outcome = replace(RIGHT, **wrong)  # type: ignore[arg-type]  # a table of different fields

    assert not outcome.ok
    assert outcome.render().endswith("WRONG")


def test_the_table_says_what_was_counted() -> None:
    text = RIGHT.render()

    for part in ("50", "2 of 3 asked for", "0.50 s, 0.25 s", "3.0e-07", "io.open", "8"):
        assert part in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ranks", "7"], "7 is not from 1 to 6"),
        (["--ranks", "0"], "0 is not from 1 to 6"),
        (["--kills", "-1"], "-1 is not at least 0"),
        (["--batch", "0"], "0 is not at least 1"),
        (["--passages", "many"], "many"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("p", "about", 6, argv)

    error = capsys.readouterr().err
    assert words in error
    assert argv[0] in error


def test_a_stream_that_is_no_terminal_gets_lines_and_no_control_characters() -> None:
    out = io.StringIO()

    with progress("embedding", 10, out) as bar:
        bar.advance(4)
        bar.note("killed rank 2")
        bar.advance(6)

    lines = out.getvalue().splitlines()
    assert lines[0] == "killed rank 2"
    assert lines[1].startswith("embedding: 10 of 10 in ")
    assert "\x1b" not in out.getvalue()
