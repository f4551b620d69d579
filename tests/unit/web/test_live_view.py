"""The account that the page is made of, on a clock of the test's."""

from __future__ import annotations

import json
from typing import Any

from phalanx.integrations.web.live_view import LiveView

NOTHING = "there is no group yet"
EMPTY: dict[str, Any] = {
    "event": "phalanx.status_ended",
    "kind": "state",
    "groups": 0,
    "ended": {},
    "at": 0.0,
}


def problem(view: LiveView) -> str:
    return str(json.loads(view.next(0, 0.0)[1])["problem"])


def test_a_driver_that_says_nothing_for_long_is_not_shown_as_well() -> None:
    view = LiveView()
    view.begin({}, 0.0)
    view.take(EMPTY, 5.0, 0.0)
    well = problem(view)

    view.wait(15.0)
    short = problem(view)
    view.wait(17.4)
    long = problem(view)
    view.take(EMPTY, 18.0, 0.0)

    assert [well, short, long] == [*2 * [NOTHING], "the driver has not answered for 12 s"]
    assert problem(view) == NOTHING
