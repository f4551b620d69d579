"""What a deadline that passes while the group heals says of whether the call has run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import Make
from tests.support.processes import LONG, wait_until
from tests.support.rank_faults import OFTEN, kill
from tests.support.workers import Echo

from phalanx.actors import Executor, RestartPolicy
from phalanx.supervision import BackOff, CallTimeout, Strategy

SHORT = 1.5  # seconds: after them the group is still down


class Marker(Echo):
    """Says by a file that it has begun, and does not end."""

    def begin(self, mark: str) -> None:
        Path(mark).touch()
        self.gated(f"{mark}.never")


@pytest.fixture
def down_long(make: Make) -> Make:
    """Builds groups that wait long before they start a rank again."""

    def build(world_size: int, strategy: Strategy) -> Executor[Any]:
        backoff = BackOff(initial=LONG, maximum=LONG, jitter=0.0)
        many = OFTEN
        return make(
            Marker,
            world_size,
            strategy=strategy,
            intensity=many,
            policy=RestartPolicy(backoff=backoff),
        )

    return build


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.ONE_FOR_ONE])
@pytest.mark.parametrize("way", ["collective", "single", "pool"])
def test_a_call_that_had_begun_and_waits_to_be_sent_again_has_been_sent(
    down_long: Make, tmp_path: Path, strategy: Strategy, way: str
) -> None:
    ex = down_long(1, strategy)
    mark = tmp_path / "begun"
    terms: dict[str, Any] = {"timeout": SHORT, "retries": 1, "args": (str(mark),)}
    ways: dict[str, Callable[[], Any]] = {
        "collective": lambda: ex.collective_rpc("begin", non_block=True, **terms),
        "single": lambda: ex.call("begin", non_block=True, **terms, rank=0),
        "pool": lambda: ex.submit("begin", **terms),
    }
    future = ways[way]()
    wait_until(mark.exists)

    kill(ex)

    error = future.exception(LONG)
    assert isinstance(error, CallTimeout)
    assert (error.sent, error.ranks) == (True, ())
    assert [report.pid for report in error.reports] == [ex.status().reports[0].pid]
    assert "cut short" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.sent, copy.ranks, len(copy.reports)) == (True, (), 1)


def test_a_call_that_no_rank_had_begun_has_never_been_sent(down_long: Make) -> None:
    ex = down_long(1, Strategy.ONE_FOR_ALL)
    kill(ex)
    wait_until(lambda: ex.status().state != "serving")

    with pytest.raises(CallTimeout, match="never sent") as caught:
        ex.collective_rpc("rank", 0.1, retries=1)

    assert (caught.value.sent, caught.value.reports) == (False, ())
