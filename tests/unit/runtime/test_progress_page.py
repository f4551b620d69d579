"""No two workers judge one call differently, whenever the driver withdraws what is not begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from phalanx.runtime.wire import progress_page
from phalanx.runtime.wire.progress_page import ProgressPage, withdraw

LIMIT = 30.0


@pytest.fixture
def pages() -> Iterator[list[ProgressPage]]:
    made = [ProgressPage.create(), ProgressPage.create()]
    yield made
    for page in made:
        page.close()


def begins(page: ProgressPage, call: int) -> bool:
    """Do as a worker that has taken *call*, sent in round 0; return whether it runs it."""
    now = page.begin(call)
    return now == 0 or not page.is_void(call, 0, now, collective=True)


def test_a_call_that_begins_while_calls_are_withdrawn_is_valid_for_all(
    pages: list[ProgressPage], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []

    def fence() -> None:  # the first stands between the announcement and the new round
        if not ran:
            ran.append(begins(pages[1], 8))

    monkeypatch.setattr(progress_page, "_fence", fence)
    for page in pages:
        assert begins(page, 7)

    reached = withdraw(pages, 1, 0)

    assert ran == [True]
    assert reached == 8
    assert begins(pages[0], 8)
    assert not begins(pages[0], 9)
    assert not begins(pages[1], 9)


@pytest.mark.parametrize("closed", [False, True])
def test_a_worker_that_sees_the_round_first_waits_for_what_the_driver_settles(
    pages: list[ProgressPage], monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    runs: list[bool] = []
    worker = threading.Thread(target=lambda: runs.append(begins(pages[1], 8)))
    fences = 0

    def fence() -> None:
        nonlocal fences
        fences += 1
        if fences == 2:  # the round has begun, and its limit is open
            worker.start()
            while pages[1].begun != 8:
                pass

    monkeypatch.setattr(progress_page, "_fence", fence)
    assert begins(pages[0], 7)

    reached = withdraw(pages, 1, 0, pages[1:] if closed else ())
    worker.join(LIMIT)

    assert reached == 8
    assert runs == [True]
    assert begins(pages[0], 8)
    assert not begins(pages[1], 9)


def test_what_a_closed_worker_has_not_begun_it_never_begins(pages: list[ProgressPage]) -> None:
    assert begins(pages[0], 7)

    withdraw(pages, 1, 0, [pages[1]])

    assert not begins(pages[1], 7)
    assert pages[1].is_shut
    assert pages[1].begun == 0


def test_a_call_that_was_cancelled_stays_so_when_its_worker_is_closed(
    pages: list[ProgressPage],
) -> None:
    withdraw(pages, 1, 0)
    pages[1].begin(8)

    withdraw(pages, 2, 0, [pages[1]])

    assert pages[1].is_void(8, 0, 2, collective=True)
