"""Which nodes are unfit to serve."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

import pytest

from phalanx.cluster.link.handshake import greeting_of, why_unfit

OURS = greeting_of("0" * 32, "127.0.0.1")
MINOR = ".".join(platform.python_version().split(".")[:2])


def test_a_node_with_the_same_versions_is_fit() -> None:
    assert why_unfit(OURS) == ""
    assert why_unfit(replace(OURS, python=f"{MINOR}.99", kernel="9.9", boot="other")) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": "3.99.1"}, f"has Python 3.99, and the driver {MINOR}"),
        ({"python": "nonsense"}, "has Python nonsense"),
        ({"phalanx": "0.0.1"}, "has phalanx 0.0.1, and the driver"),
        ({"torch": "1.0"}, "has torch 1.0, and the driver"),
    ],
)
def test_a_node_with_another_version_is_unfit_and_the_reason_names_both(
    change: dict[str, Any], said: str
) -> None:
    why = why_unfit(replace(OURS, host="far", **change))

    assert why.startswith("far has ")
    assert said in why
    assert why.endswith("install the same version on both")
