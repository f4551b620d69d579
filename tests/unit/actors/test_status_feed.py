"""A status fits into log records however large the group, its cluster and its tree are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from phalanx.actors import WorkerActor
from phalanx.actors.observe.status_feed import status_of
from phalanx.runtime import NodeInfo, Picture, RankInfo, Sketch
from phalanx.runtime.event import fields
from phalanx.runtime.observe.log_channel import encode_record
from phalanx.runtime.observe.status import StatusEnded
from phalanx.supervision import ChildSnapshot, ExitKind, ExitReason, SupervisorSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "ip-10-0-12-123.eu-central-1.compute.internal"


def gpu(number: int) -> str:
    return f"GPU-8f3a1c2e-1111-2222-3333-{number:012}"


def rank_of(number: int) -> RankInfo:
    doing: dict[str, Any] = {"served": 10**9, "owed": 8, "method": "compute_next_logits"}
    running = 1234.5678901234567
    return RankInfo(
        number, 1 << 22, 12, 12, "up", gpu(number), running_for=running, host=HOST, **doing
    )


def node_of(number: int) -> NodeInfo:
    ranks = tuple(range(8 * number, 8 * number + 8))
    return NodeInfo(number, HOST, "up", ranks, "f" * 40, tuple(map(gpu, ranks)), 0.123456789)


def shown(
    ranks: int, nodes: int, look: Callable[[], SupervisorSnapshot] | None = None
) -> tuple[Picture | None, list[dict[str, Any]]]:
    """Return the picture of such a group as an observer puts it together, and the records."""
    intensity = SimpleNamespace(max_restarts=3, period=60.0)
    policy = SimpleNamespace(strategy="one_for_all", intensity=intensity)
    spec = SimpleNamespace(name="root/tp", worker=WorkerActor, policy=policy)
    view = {"phase": "serving", "epoch": 1, "restarts": 0, "restarts_in_window": 0}
    counts = {"in_flight": 0, "waiting": 0, "dropped_replies": 0}
    group = SimpleNamespace(
        view=SimpleNamespace(**view, planned=0, standby=0),
        ranks=lambda: tuple(map(rank_of, range(ranks))),
        nodes=lambda: tuple(map(node_of, range(nodes))),
        devices=tuple,
        clock=lambda: 1.0,
        plane=SimpleNamespace(meter=None, clock=lambda: 1.0, counts=lambda: counts),
    )
    events = [*status_of(cast("Any", spec), cast("Any", group), look)]
    events.append(StatusEnded(groups=1, ended={}, at=1.0))
    records = [json.loads(encode_record({"timestamp": "x" * 32, **fields(e)})) for e in events]
    sketch = Sketch()
    taken = [sketch.take({**record, "kind": "state"}) for record in records]
    return taken[-1], records


def test_a_group_of_many_ranks_and_nodes_is_shown_whole() -> None:
    picture, records = shown(ranks=400, nodes=53)

    assert not any("truncated" in record for record in records)
    assert picture is not None
    (group,) = picture.groups
    assert [rank["rank"] for rank in group["ranks"]] == list(range(400))
    assert [node["node"] for node in group["nodes"]] == list(range(53))


def test_nodes_without_ranks_are_shown_too() -> None:
    picture, _ = shown(ranks=1, nodes=120)

    assert picture is not None
    assert [node["node"] for node in picture.groups[0]["nodes"]] == list(range(120))


def test_a_group_that_has_ended_for_a_long_reason_is_told_of() -> None:
    end = StatusEnded(groups=0, ended={"tp": "a key is missing; " * 10_000}, at=1.0)

    picture = Sketch().take(json.loads(encode_record(fields(end))))

    assert picture is not None
    assert picture.incomplete().startswith("group tp has ended: a key is missing")


@pytest.mark.parametrize(
    ("name", "detail", "least"), [("jobs", "no", 200), ("j" * 200, "\u2713" * 80, 50)]
)
def test_of_a_tree_as_many_children_are_shown_as_there_is_room_for(
    name: str, detail: str, least: int
) -> None:
    child: Any = ChildSnapshot
    common = ("worker", "permanent", "running", 10**6, 0, ExitReason(ExitKind.CRASH, detail))
    children = tuple(child(f"root/{name}/{n}", *common, 1.0, None) for n in range(200))
    strategy: Any = "one_for_one"
    top = SupervisorSnapshot("root", strategy, 0, 3, 60.0, None, children)

    picture, records = shown(1, 0, lambda: top)

    assert not any("truncated" in record for record in records)
    assert picture is not None
    (tree,) = picture.trees
    assert len(tree["children"]) >= least
    assert len(tree["children"]) + tree["hidden"] == 200
