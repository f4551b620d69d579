"""The state that a new worker gets from the journal of the old ones, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import SpecError
from phalanx.integrations.vllm import supervised
from phalanx.integrations.vllm.journal import Journal


def told(journal: Journal) -> list[tuple[Any, ...]]:
    return [(each.method, each.args, dict(each.kwargs)) for each in journal.entries()]


def asleep(journal: Journal, level: int) -> None:
    journal.note("sleep", (), {"level": level})


def awake(journal: Journal, *tags: str) -> None:
    journal.note("wake_up", (), {"tags": list(tags)})


@pytest.mark.parametrize("times", [1, 3])
def test_an_engine_that_was_woken_part_by_part_is_awake(times: int) -> None:
    # As where weights are updated between the two: asleep again, new ones would be thrown away.
    journal = Journal()

    for _ in range(times):
        asleep(journal, 2)
        awake(journal, "weights")
        awake(journal, "kv_cache")

    assert told(journal) == []


def test_weights_that_are_awake_are_not_thrown_away_by_the_deep_sleep_they_woke_from() -> None:
    journal = Journal(["update"])

    asleep(journal, 2)
    deep = told(journal)
    awake(journal, "weights")
    journal.note("update", (1,))

    assert deep == [("sleep", (), {"level": 2})]
    assert told(journal) == [
        ("update", (1,), {}),
        ("sleep", (), {"level": 1}),
        ("wake_up", (), {"tags": ["weights"]}),
    ]


def test_memory_that_was_given_away_is_until_it_is_woken() -> None:
    journal = Journal()

    journal.note("discard", (("kv_cache",),))
    given_away = told(journal)
    awake(journal, "kv_cache")

    assert given_away == [("discard", (("kv_cache",),), {})]
    assert told(journal) == []


# --- weights that may be lost -------------------------------------------------------------------


def test_every_call_of_a_users_that_is_neither_replayed_nor_harmless_may_have_set_weights() -> None:
    journal = Journal(["update"], harmless=["look", "count"])

    for method in ("update", "look", "check_health", "list_loras", "profile", "add_lora"):
        journal.note(method, (SimpleNamespace(lora_int_id=1),))
    journal.note("start_weight_update")
    journal.note(b"pickled", name="count")
    assert journal.lost == []

    for method in ("reload_weights", "finish_weight_update", "mine"):
        journal.note(method)
    journal.note(b"pickled", name="scale")

    assert journal.lost == ["finish_weight_update", "mine", "reload_weights", "scale"]


def test_a_call_in_doubt_may_have_set_weights_even_if_it_is_replayed() -> None:
    journal = Journal(["update"], harmless=["look"])

    for method in ("look", "list_loras", "update"):
        journal.note_possible_update(method)

    assert journal.lost == ["update"]


def test_what_is_in_doubt_is_forgotten_with_the_updates_before_two_whole_ones() -> None:
    journal = Journal(["load", "finish"], superseding=["finish"])

    journal.note_possible_update("load")  # of the update that is ended next, perhaps
    journal.note("finish")
    assert journal.lost == ["load"]
    journal.note_possible_update("mine")
    journal.note("finish")
    assert journal.lost == ["mine"]
    journal.note("finish")

    assert journal.lost == []


def test_what_is_replayed_are_the_arguments_as_they_were() -> None:
    weights = [1, 2]
    journal = Journal(["update"])

    journal.note("update", (weights,))
    weights.append(3)

    assert told(journal) == [("update", ([1, 2],), {})]


def test_of_updates_of_all_weights_the_last_whole_one_and_what_follows_it_are_replayed() -> None:
    journal = Journal(["start", "update", "finish"], superseding=["finish"])
    whole: list[Any] = [("start", (), {}), ("update", (2,), {}), ("finish", (), {})]

    for number in (1, 2):
        journal.note("start")
        journal.note("update", (number,))
        journal.note("finish")
    complete = told(journal)
    journal.note("start")

    assert complete == whole
    assert told(journal) == [*whole, ("start", (), {})]


def test_a_replay_has_a_bound_beyond_which_weights_are_lost() -> None:
    bounded = Journal(["update"], superseding=["update"], most=1000)
    endless = Journal(["update"], most=1000)

    for _ in range(20):
        bounded.note("update", (bytes(400),))
        endless.note("update", (bytes(400),))

    assert bounded.lost == []
    assert len(told(bounded)) == 1
    assert "update (more than 1000 bytes to replay)" in endless.lost
    assert told(endless) == []


def test_a_policy_given_in_two_ways_is_refused_and_neither_is_ignored() -> None:
    with pytest.raises(SpecError, match="supervised"):
        supervised(additional_config={"phalanx": {"standby": 1}}, standby=2)
