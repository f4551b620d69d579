"""Looking before sleeping: when it looks, and when it has learned not to."""

from __future__ import annotations

import itertools

from phalanx.runtime import Spinner


class Source:
    """Counts how often it is asked, and has something the n-th time."""

    def __init__(self, after: int | None = None) -> None:
        self.asked = 0
        self._after = after

    def __call__(self) -> list[int]:
        self.asked += 1
        return [1] if self._after is not None and self.asked > self._after else []


def looks(spinner: Spinner, waits: int) -> list[int]:
    """Return in which of so many waits in vain it has looked."""
    found: list[int] = []
    for number in range(waits):
        source = Source()
        spinner.look(source, 0.0)
        if source.asked:
            found.append(number)
    return found


def test_it_asks_until_there_is_something() -> None:
    source = Source(after=100)

    assert Spinner().look(source, 30.0) == [1]
    assert source.asked == 101


def test_it_ends_when_its_time_is_over() -> None:
    assert Spinner().look(Source(), 0.001) == []


def test_it_ends_when_it_is_told_to() -> None:
    source = Source()

    assert Spinner().look(source, 30.0, lambda: source.asked == 5) == []
    assert source.asked == 5


def test_looks_in_vain_become_rare() -> None:
    found = looks(Spinner(), 2000)

    assert found[:6] == [0, 2, 6, 14, 30, 62]
    assert {later - one for one, later in itertools.pairwise(found[8:])} == {256}


def test_a_look_that_finds_something_too_late_was_in_vain() -> None:
    spinner = Spinner()

    assert spinner.look(Source(after=0), 0.0) == [1]  # its processor was another's meanwhile
    assert looks(spinner, 7) == [1, 5]


def test_a_look_that_finds_something_brings_the_others_back() -> None:
    spinner = Spinner()
    looks(spinner, 6)  # the next one looks

    assert spinner.look(Source(after=3), 30.0) == [1]
    assert spinner.look(Source(after=3), 30.0) == [1]
    assert looks(spinner, 7) == [0, 2, 6]
