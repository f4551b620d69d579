"""What a user says of a cluster, and of a Ray one, is checked field by field, without Ray."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError
from typing import Any, cast

import pytest

from phalanx.cluster.ray.options import Ray
from phalanx.runtime import EventLoop
from phalanx.supervision import MissingPackage, RuntimeFault, SpecError

LOOP = cast("EventLoop", None)  # not reached


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("address", "ray://10.0.0.1:10001", "run the driver on a machine of the cluster"),
        ("address", "", "give 'auto'"),
        ("address", "local", "give 'auto'"),
        ("address", None, "give 'auto'"),
        ("resources", ["GPU"], "give a mapping"),
        ("resources", {1: 1}, "give a mapping"),
        ("runtime_env", "requirements.txt", "give a mapping"),
        ("runtime_env", {"py_modules": [pytest]}, "give plain values"),
        ("runtime_env", {"env_vars": {"X": math.nan}}, "give plain values"),
        ("runtime_env", {"env_vars": {"X": "x" * 100_000}}, "put long values into working_dir"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy) as raised:
        Ray(**{field: value})

    assert raised.value.field == f"cluster.{field}"


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
def test_a_field_of_any_cluster_that_makes_no_sense_is_named_with_its_value(
    field: str, value: Any
) -> None:
    with pytest.raises(SpecError) as raised:
        Ray(**{field: value})

    assert (raised.value.field, repr(raised.value.value)) == (f"cluster.{field}", repr(value))


def test_an_amount_that_makes_no_sense_is_named() -> None:
    with pytest.raises(SpecError, match=r"cluster\.resources\['GPU'\]=-1"):
        Ray(resources={"GPU": -1})


def test_a_ray_that_is_too_old_or_missing_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.51.1")
    with pytest.raises(RuntimeFault, match=r"Ray 2\.51\.1 is too old: pip install 'ray>=2\.52'"):
        Ray().engine(LOOP, gpus_per_rank=1)

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(MissingPackage, match=r"pip install 'phalanx\[ray\]'"):
        Ray().engine(LOOP, gpus_per_rank=1)
