"""What an executor is to be, decided before anything starts, and what it may become."""

from __future__ import annotations

import functools
import inspect
import math
import tomllib
from typing import Any

import pytest
from tests.support.workers import Echo

from phalanx.actors import (
    Devices,
    Executor,
    Layout,
    Limits,
    RestartPolicy,
    StopPolicy,
    WorkerActor,
    method,
)
from phalanx.actors.spec.options import (
    REPLACED,
    ExecutorSpec,
    layout_for,
    replaced_keywords,
    spec_of,
)
from phalanx.actors.spec.worker import Methods
from phalanx.runtime import DevicePool
from phalanx.supervision import (
    BackOff,
    BadArguments,
    Intensity,
    Restart,
    SpecError,
    Strategy,
)
from phalanx.testing import FakeGpus


def spec(**options: Any) -> ExecutorSpec:
    options = {"devices": "cpu", **options}
    return spec_of(Echo, **options)


def test_an_executor_has_no_more_than_eighteen_parameters() -> None:
    assert len(inspect.signature(Executor).parameters) <= 18


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"start_timeout": 9.0}, {"limits": {"start": 9.0}}),
        ({"stopped_after": None}, {"limits": {"stopped": None}}),
        ({"restart": "transient"}, {"policy": {"restart": "transient"}}),
        ({"backoff": None}, {}),
        ({"launch": "exec", "env": {"A": "1"}}, {"launch": {"method": "exec", "env": {"A": "1"}}}),
        (
            {"devices": "cpu", "devices_per_rank": 0.5},
            {"devices": {"names": "cpu", "per_rank": 0.5}},
        ),
        ({"tensor": 1, "pipeline": 2}, {"layout": {"pipeline": 2}}),
        (
            {"policy": RestartPolicy(standby=1), "leave_within": 1.0},
            {"policy": RestartPolicy(standby=1, leave_within=1.0)},
        ),
    ],
)
def test_old_keywords_mean_what_they_meant_and_warn(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    former = replaced_keywords({**REPLACED, "restart": "policy.restart"})(spec)

    with pytest.warns(DeprecationWarning, match="is deprecated"):
        then = former(name="x", **old)

    assert then == spec(name="x", **new)


def test_groups_may_be_tables_of_a_document() -> None:
    tables = tomllib.loads("""
        strategy = "one_for_one"
        intensity = [5, 10.0]
        hang_after = 7
        launch = "exec"
        [policy]
        restart = "transient"
        standby = 2
        backoff = { initial = 0.5 }
        [devices]
        names = "cpu"
        visibility = "all"
        [limits]
        start = 60
        stop = { ask = 1.0 }
        [layout]
        tensor = 2
    """)

    found = spec(**tables)

    assert found.policy == RestartPolicy(
        strategy=Strategy.ONE_FOR_ONE,
        intensity=Intensity(5, 10.0),
        restart=Restart.TRANSIENT,
        standby=2,
        backoff=BackOff(initial=0.5),
    )
    assert found.limits == Limits(start=60.0, hang=7.0, stop=StopPolicy(ask=1.0))
    assert (found.launch.method, found.devices.visibility, found.world_size) == ("exec", "all", 2)


def test_an_error_names_the_short_form_or_the_field_whichever_was_written() -> None:
    wrong: list[dict[str, Any]] = [{"limits": {"hang": -1}}, {"launch": {"method": "x"}}]
    wrong += [{"hang_after": -1}, {"launch": "x"}]
    names = list[str]()
    for options in wrong:
        with pytest.raises(SpecError) as refused:
            spec(**options)
        names.append(refused.value.field)

    assert names == ["limits.hang", "launch.method", "hang_after", "launch"]


def test_a_short_form_goes_over_its_group() -> None:
    both = spec(strategy="one_for_one", policy=RestartPolicy(standby=3))

    assert (both.policy.strategy, both.policy.standby) == (Strategy.ONE_FOR_ONE, 3)


def test_ranks_that_share_a_device_may_become_more_than_there_are_devices() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    shared = spec(world_size=2, devices=Devices(names=pool, per_rank=0.25))
    try:
        grown = layout_for(shared, 4, None, now=shared.layout)

        assert grown.world_size == 4
        with pytest.raises(SpecError):
            layout_for(shared, 5, None, now=shared.layout)
    finally:
        pool.close()


def test_ranks_that_were_laid_out_are_laid_out_anew_in_words() -> None:
    laid_out = spec(layout=Layout(tensor=2))

    with pytest.raises(SpecError, match="layout"):
        layout_for(laid_out, 4, None, now=laid_out.layout)

    assert layout_for(laid_out, 4, Layout(tensor=4), now=laid_out.layout).world_size == 4


def test_an_inline_rank_stays_alone() -> None:
    inline = spec(launch="inline")

    with pytest.raises(SpecError, match="inline"):
        layout_for(inline, 2, None, now=inline.layout)


@pytest.mark.parametrize("field", ["kwargs", "launch.rank_kwargs"])
def test_arguments_that_have_no_name_are_refused_by_the_field_they_stand_in(field: str) -> None:
    nameless: Any = {1: "one"}

    with pytest.raises(SpecError) as raised:
        spec(kwargs=nameless) if field == "kwargs" else spec(launch={"rank_kwargs": [nameless]})

    assert raised.value.field.startswith(field)


def test_a_variable_that_is_set_later_in_a_given_environment_is_not_taken_over() -> None:
    given: Any = {"A": "1"}
    found = spec(launch={"env": given, "rank_env": [given]}).launch

    given["A"] = 1  # which no environment can hold

    assert (found.env, *found.rank_env) == ({"A": "1"}, {"A": "1"})


@pytest.mark.parametrize("name", ["tensor", "tp"])
def test_a_further_dimension_takes_no_name_of_another(name: str) -> None:
    with pytest.raises(SpecError, match="give another name"):
        Layout(tensor=2, extra={name: 2})


def test_a_size_of_a_further_dimension_that_is_changed_later_is_not_taken_over() -> None:
    sizes = {"expert": 2}
    layout = Layout(tensor=2, extra=sizes)

    sizes["expert"] = 0

    assert layout.coordinates(1)["expert"] == 1


@pytest.mark.parametrize("field", ["rank_env", "rank_kwargs"])
def test_a_group_gets_no_more_ranks_than_it_has_values_of_single_ranks_for(field: str) -> None:
    own = spec(world_size=2, launch={field: [{}, {}]})

    assert layout_for(own, 1, None, now=own.layout).world_size == 1
    with pytest.raises(SpecError, match=f"launch.{field} has entries for 2 ranks"):
        layout_for(own, 3, None, now=own.layout)


class Unprintable:
    def __repr__(self) -> str:
        raise AssertionError("its text may take more memory than there is")


def test_an_argument_that_can_be_pickled_is_not_made_a_text_of() -> None:
    value = Unprintable()

    found = spec(args=(value,), kwargs={"one": value}, launch={"rank_kwargs": [{"two": value}]})

    assert len(found.keywords) == 1


def test_a_call_of_a_partial_function_has_the_name_of_the_function() -> None:
    part = functools.partial(functools.partial(print, Unprintable()), end="")

    assert Methods(Echo).declared_of(part, [((), {})])[0] == "print"


declared: Any = method(idempotent=True, reply="every")


class Named(WorkerActor):
    def put(self, *values: int, key: str) -> None: ...

    outer = declared(staticmethod(lambda: None))
    inner = staticmethod(declared(lambda: None))
    root = math.sqrt


@pytest.mark.parametrize("name", ["outer", "inner"])
def test_a_static_method_has_what_is_declared_of_it_in_either_order(name: str) -> None:
    methods = Methods(Named)

    assert methods.find(name).declared.idempotent
    assert methods.declares_reply(name)


def test_a_missing_keyword_behind_any_number_of_arguments_is_refused_before_it_is_sent() -> None:
    methods = Methods(Named)

    with pytest.raises(BadArguments, match="key"):
        methods.declared_of("put", [((1, 2), {})])
    methods.declared_of("put", [((1, 2), {"key": "k"})])


def test_a_callable_that_is_not_bound_to_its_object_takes_all_of_its_arguments() -> None:
    methods = Methods(Named)

    methods.declared_of("root", [((4.0,), {})])
    with pytest.raises(BadArguments, match="too many"):
        methods.declared_of("root", [((4.0, 2.0), {})])
