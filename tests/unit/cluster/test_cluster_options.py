"""What a user says of a cluster is checked field by field, before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from phalanx.cluster.driver.engine import Engine
from phalanx.cluster.driver.options import ClusterOptions
from phalanx.runtime import EventLoop
from phalanx.supervision import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing(ClusterOptions):
    def engine(self, loop: EventLoop, *, gpus_per_rank: float) -> Engine:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("ranks_per_node", value) for value in (0, -1, 1.5, True, "8")],
        *[("spare_nodes", value) for value in (-1, 0.5, None, False)],
        *[("node_timeout", value) for value in (0, 0.4, math.inf, math.nan, "10", None)],
        *[("node_wait", value) for value in (0, -1, math.nan, "600", True)],
        *[("bind", value) for value in ("", "localhost", "0.0.0.0", "::", "10.0.0.1:80", 7)],
    ],
)
def test_a_field_that_makes_no_sense_is_named_with_its_value(field: str, value: Any) -> None:
    with pytest.raises(SpecError) as raised:
        Nothing(**{field: value})

    assert (raised.value.field, repr(raised.value.value)) == (f"cluster.{field}", repr(value))


def test_every_field_has_a_default_and_none_is_no_limit() -> None:
    options = Nothing(node_wait=None, bind="fd00::1", ranks_per_node=8, spare_nodes=2)

    assert (options.node_timeout, options.node_wait) == (10.0, None)
