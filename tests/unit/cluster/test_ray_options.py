"""What a user says of a Ray cluster is checked field by field, without Ray."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError
from typing import Any, cast

import pytest

from phalanx.cluster.ray import options
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
        ("runtime_env", {"env_vars": {"X": "x" * 100_000}}, "put what is long into working_dir"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy) as raised:
        Ray(**{field: value})

    assert raised.value.field == f"cluster.{field}"


def test_an_amount_that_makes_no_sense_is_named() -> None:
    with pytest.raises(SpecError, match=r"cluster\.resources\['GPU'\]=-1"):
        Ray(resources={"GPU": -1})


def test_a_ray_that_is_too_old_or_missing_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "version", lambda _: "2.51.1")
    with pytest.raises(RuntimeFault, match=r"Ray 2\.51\.1 is too old: pip install 'ray>=2\.52'"):
        Ray().engine(LOOP, gpus_per_rank=1)

    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(options, "version", missing)
    with pytest.raises(MissingPackage, match=r"pip install 'phalanx\[ray\]'"):
        Ray().engine(LOOP, gpus_per_rank=1)
