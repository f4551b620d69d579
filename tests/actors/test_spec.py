"""What an executor is to be, decided before anything starts, and what it may become."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tests.actors.workers import Echo

from phalanx.actors import Executor, Layout
from phalanx.actors.spec.options import ExecutorSpec, layout_for, spec_of
from phalanx.runtime import DevicePool
from phalanx.runtime.devices.fake_gpus import FakeGpus
from phalanx.supervision import SpecError


def spec(**options: Any) -> ExecutorSpec:
    given = inspect.signature(Executor).bind(Echo, **{"devices": "cpu", **options})
    given.apply_defaults()
    values = dict(given.arguments)
    del values["runtime"], values["replace"], values["_place"]
    return spec_of(**values)


def test_ranks_that_share_a_device_may_become_more_than_there_are_devices() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    shared = spec(world_size=2, devices=pool, devices_per_rank=0.25)
    try:
        grown = layout_for(shared, 4, None, now=shared.layout)

        assert grown.world_size == 4
        with pytest.raises(SpecError):
            layout_for(shared, 5, None, now=shared.layout)
    finally:
        pool.close()


def test_ranks_that_were_laid_out_are_laid_out_anew_in_words() -> None:
    laid_out = spec(tensor=2)

    with pytest.raises(SpecError, match="layout"):
        layout_for(laid_out, 4, None, now=laid_out.layout)

    assert layout_for(laid_out, 4, Layout(tensor=4), now=laid_out.layout).world_size == 4


def test_an_inline_rank_stays_alone() -> None:
    inline = spec(launch="inline")

    with pytest.raises(SpecError, match="inline"):
        layout_for(inline, 2, None, now=inline.layout)


@pytest.mark.parametrize("field", ["kwargs", "rank_kwargs"])
def test_arguments_that_have_no_name_are_refused_by_the_field_they_stand_in(field: str) -> None:
    nameless: Any = {1: "one"}

    with pytest.raises(SpecError) as raised:
        spec(**{field: nameless if field == "kwargs" else [nameless]})

    assert raised.value.field.startswith(field)
