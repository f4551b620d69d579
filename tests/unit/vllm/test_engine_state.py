"""What a new worker is told of the state the old ones were in, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import SpecError
from phalanx.integrations.vllm import supervised
from phalanx.integrations.vllm.journal import Journal
from phalanx.integrations.vllm.policy import check_config


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


def test_calls_that_a_new_worker_is_not_told_are_named() -> None:
    journal = Journal(["update"])

    for method in ("update", "reload_weights", b"pickled", "check_health", "list_loras", "profile"):
        journal.note(method)

    assert journal.forgotten == ["a callable", "reload_weights"]


def test_ranks_that_are_to_be_bound_by_numactl_are_refused_by_name() -> None:
    parallel = SimpleNamespace(data_parallel_size=1, numa_bind=True)

    with pytest.raises(SpecError, match="numactl") as caught:
        check_config(SimpleNamespace(parallel_config=parallel))

    assert caught.value.field == "numa_bind"


def test_a_policy_given_in_two_ways_is_refused_and_neither_is_ignored() -> None:
    with pytest.raises(SpecError, match="supervised"):
        supervised(additional_config={"phalanx": {"standby": 1}}, standby=2)
