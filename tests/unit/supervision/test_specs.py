"""An invalid spec cannot be built, in Python or in TOML."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from typing import Any

import pykka
import pytest

import phalanx
from phalanx.supervision import (
    BRUTAL_KILL,
    AutoShutdown,
    BackOff,
    ChildSpec,
    ChildType,
    Decider,
    Directive,
    Intensity,
    Restart,
    Rule,
    SpecError,
    Strategy,
    SupervisorSpec,
    link,
    pykka_child,
    thread_child,
    tree_from_toml,
)
from phalanx.testing import FakeGpus


def start(ctx: Any) -> Any:
    raise AssertionError("nothing starts here")


A = ChildSpec("a", start)

# Types would refuse most of what follows; these tests are for those who have none.
AnyChild: Any = ChildSpec
AnySupervisor: Any = SupervisorSpec
AnyIntensity: Any = Intensity
AnyDecider: Any = Decider
AnyRule: Any = Rule


@pytest.mark.parametrize(
    ("build", "field", "value"),
    [
        (lambda: AnyChild("", start), "id", ""),
        (lambda: AnyChild("a/b", start), "id", "a/b"),
        (lambda: AnyChild("a", 5), "start", 5),
        (lambda: AnyChild("a", start, restart="sometimes"), "restart", "sometimes"),
        (lambda: AnyChild("a", start, shutdown=-1), "shutdown", -1),
        (lambda: AnyChild("a", start, shutdown=math.nan), "shutdown", math.nan),
        (lambda: AnyChild("a", start, shutdown="soon"), "shutdown", "soon"),
        *[
            (partial(AnyChild, "a", made, shutdown=BRUTAL_KILL), "shutdown", BRUTAL_KILL)
            for made in (
                pykka.ThreadingActor.start,
                pykka_child(pykka.ThreadingActor),
                thread_child(print),
            )
        ],  # nothing can kill these
        (lambda: AnyChild("a", start, type="thing"), "type", "thing"),
        (lambda: AnyChild("a", start, significant=1), "significant", 1),
        (lambda: AnyChild("a", start, significant=True), "significant", True),
        (lambda: AnyChild("a", start, start_within=-1), "start_within", -1),
        (lambda: AnySupervisor("a/b"), "id", "a/b"),
        (lambda: AnySupervisor("s", "two_for_one"), "strategy", "two_for_one"),
        (lambda: AnySupervisor("s", intensity=3), "intensity", 3),
        (lambda: AnySupervisor("s", auto_shutdown="maybe"), "auto_shutdown", "maybe"),
        (lambda: AnySupervisor("s", children=[5]), "children", 5),
        (lambda: AnySupervisor("s", children=[A, A]), "children", "a"),
        (lambda: AnySupervisor("s", "simple_one_for_one"), "children", 0),
        (lambda: AnySupervisor("s", "dynamic", children=[A]), "children", 1),
        (lambda: AnySupervisor("s", max_children=3), "max_children", 3),
        (lambda: AnySupervisor("s", "dynamic", max_children=-1), "max_children", -1),
        (lambda: AnySupervisor("s", fruitless_limit=0), "fruitless_limit", 0),
        (lambda: AnySupervisor("s", backoff=1.0), "backoff", 1.0),
        (lambda: AnySupervisor("s", decider=start), "decider", start),
        (
            lambda: AnySupervisor(
                "s", children=[AnyChild("a", start, restart="transient", significant=True)]
            ),
            "auto_shutdown",
            AutoShutdown.NEVER,
        ),
        (lambda: AnyChild("a", start, args=5), "args", 5),
        (lambda: AnyChild("a", start, args="abc"), "args", "abc"),
        (lambda: AnyChild("a", SupervisorSpec("s"), (5,)), "args", (5,)),
        (lambda: pykka_child("a"), "pykka_child", "a"),
        (lambda: thread_child(5), "thread_child", 5),
        (lambda: AnyChild("a", start, killable=5), "killable", 5),
        (lambda: AnyChild("a", pykka.ThreadingActor), "start", pykka.ThreadingActor),
        (lambda: AnyChild("a", phalanx.WorkerActor), "start", phalanx.WorkerActor),
        (lambda: AnySupervisor("s", children=5), "children", 5),
        (lambda: AnySupervisor("s", children="ab"), "children", "ab"),
        (lambda: AnyDecider(5), "rules", 5),
        (lambda: AnyDecider((5,)), "rules", 5),
        (lambda: AnyDecider((), "restart"), "default", "restart"),
        (lambda: AnyRule(ValueError, Directive.STOP, 5), "child", 5),
        (lambda: AnyRule(int, Directive.STOP), "match", int),
        (lambda: AnyIntensity(-1), "max_restarts", -1),
        (lambda: AnyIntensity(1.5), "max_restarts", 1.5),
        (lambda: AnyIntensity(1, 0), "period", 0),
        (lambda: AnyIntensity(1, math.inf), "period", math.inf),
        (lambda: BackOff(factor=0.5), "factor", 0.5),
        (lambda: BackOff(jitter=2), "jitter", 2),
        (lambda: BackOff(initial=-1), "initial", -1),
        (lambda: BackOff(initial=100), "initial", 100),
        (lambda: BackOff(maximum=0.01), "maximum", 0.01),
    ],
)
def test_bad_values_are_named_when_the_spec_is_built(build: Any, field: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        build()

    assert caught.value.field == field
    assert repr(caught.value.value) == repr(value)
    assert caught.value.remedy


def test_a_number_greater_than_any_float_is_refused() -> None:
    for build in (partial(AnyChild, "a", start, shutdown=10**400), partial(Intensity, 1, 10**400)):
        with pytest.raises(SpecError, match="give a finite number"):
            build()


def test_defaults_are_those_of_otp() -> None:
    sub = ChildSpec("s", SupervisorSpec("s"))
    spec = SupervisorSpec("top")

    assert (A.restart, A.shutdown, A.type, A.significant) == (
        Restart.PERMANENT, 5.0, ChildType.WORKER, False,
    )  # fmt: skip
    assert (sub.shutdown, sub.type) == (math.inf, ChildType.SUPERVISOR)
    assert (spec.strategy, spec.intensity) == (Strategy.ONE_FOR_ONE, Intensity(1, 5.0))


def test_words_of_otp_are_accepted_as_strings() -> None:
    child = AnyChild("a", start, restart="transient", shutdown="brutal_kill")

    assert (child.restart, child.shutdown) == (Restart.TRANSIENT, BRUTAL_KILL)
    assert AnyChild("a", start, shutdown="infinity").shutdown == math.inf


# --- TOML ---------------------------------------------------------------------------------

TREE = """
root = "app"

[supervisor.app]
strategy = "rest_for_one"
intensity = { max_restarts = 3, period = 60.0 }
backoff = { initial = 0.5 }
children = ["store", "pool"]

[supervisor.pool]
strategy = "one_for_all"
restart = "transient"
children = ["left"]

[worker.store]
start = "store"
args = ["/data"]
shutdown = 30.0

[worker.left]
start = "phalanx.supervision:link"
shutdown = inf
"""


def test_a_toml_tree_is_the_spec_that_python_would_build() -> None:
    pool = SupervisorSpec(
        "pool", Strategy.ONE_FOR_ALL, children=[ChildSpec("left", link, shutdown=math.inf)]
    )
    wanted = SupervisorSpec(
        "app",
        Strategy.REST_FOR_ONE,
        Intensity(3, 60.0),
        [
            ChildSpec("store", start, ("/data",), shutdown=30.0),
            ChildSpec("pool", pool, restart=Restart.TRANSIENT),
        ],
        backoff=BackOff(0.5),
    )

    assert tree_from_toml(TREE, {"store": start}) == wanted


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('children = ["left"]', 'children = ["left", "app"]', "supervisor.app.children"),
        ('children = ["left"]', 'children = ["left", "pool"]', "supervisor.pool.children"),
        ('"left"]', '"left", "right"]', "supervisor.pool.children"),
        ('"left"]', "7]", "supervisor.pool.children"),
        ('children = ["left"]', 'children = "left"', "supervisor.pool.children"),
        ('["store", "pool"]', '["store"]', "children"),
        ('"rest_for_one"', '"rest_for_two"', "supervisor.app.strategy"),
        ("max_restarts = 3", "max_restarts = -3", "supervisor.app.intensity.max_restarts"),
        ("max_restarts = 3", "restarts = 3", "supervisor.app.intensity.restarts"),
        ("initial = 0.5", "initial = -1", "supervisor.app.backoff.initial"),
        ("shutdown = 30.0", "shutdown = -30.0", "worker.store.shutdown"),
        ("shutdown = 30.0", "shut_down = 30.0", "worker.store.shut_down"),
        ('"transient"', '"trans"', "supervisor.pool.restart"),
        ('start = "store"', 'start = "nowhere"', "worker.store.start"),
        ('start = "store"', 'start = "no.such.module:x"', "worker.store.start"),
        ('start = "store"', 'start = "math:nothing"', "worker.store.start"),
        ('start = "store"', "", "worker.store.start"),
        ('root = "app"', 'root = "left"', "root"),
        ('root = "app"', "", "root"),
        ('root = "app"', 'root = "app', "toml"),
        ('root = "app"', 'root = "app"\ntop = 1', "top"),
        ('start = "store"', 'start = ".x:y"', "worker.store.start"),
        ('start = "store"', "start = 5", "worker.store.start"),
        ('start = "store"', 'start = "antigravity_that_raises:fly"', "worker.store.start"),
        ('args = ["/data"]', "args = 5", "worker.store.args"),
        ('args = ["/data"]', 'args = "abc"', "worker.store.args"),
        ('"left"]', '["a"]]', "supervisor.pool.children"),
        ('root = "app"', 'root = "app"\nsupervisor.x.children = ["x"]', "supervisor.x.children"),
        (
            'root = "app"',
            'root = "app"\nsupervisor.x.children = ["y"]\nsupervisor.y.children = ["x"]',
            "supervisor.x.children",
        ),
        ('root = "app"', 'root = "app"\nsupervisor.x.children = 5', "supervisor.x.children"),
        ('strategy = "rest_for_one"', 'restart = "transient"', "supervisor.app.restart"),
        ('root = "app"', 'root = "app"\nworker.pool.start = "store"', "children"),
    ],
)
def test_a_bad_toml_tree_names_the_place(
    old: str, new: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "antigravity_that_raises.py").write_text("raise ValueError('at import')")
    monkeypatch.syspath_prepend(tmp_path)
    assert old in TREE

    with pytest.raises(SpecError) as caught:
        tree_from_toml(TREE.replace(old, new, 1), {"store": start})

    assert caught.value.field == field


def test_a_cycle_is_shown_with_its_way() -> None:
    text = TREE.replace('["left"]', '["app"]')

    with pytest.raises(SpecError, match="app -> pool -> app"):
        tree_from_toml(text, {"store": start})


def test_a_document_may_be_deeper_than_the_stack() -> None:
    depth = 1200
    rows = [f'[supervisor.s{i}]\nchildren = ["s{i + 1}"]' for i in range(depth)]

    spec = tree_from_toml("\n".join(['root = "s0"', *rows, f"[supervisor.s{depth}]"]))

    for i in range(depth):
        assert spec.id == f"s{i}"
        below = spec.child_specs[0].start
        assert isinstance(below, SupervisorSpec)
        spec = below


EXECUTORS = """
root = "app"

[supervisor.app]
children = ["model"]

[executor.model]
worker = "tests.support.workers:Echo"
world_size = 2
restart = "transient"
strategy = "one_for_one"
args = ["hi"]
policy = { intensity = { max_restarts = 9, period = 60.0 }, backoff = { initial = 0.5 } }
limits = { start = 20.0, stop = { ask = 1.0 } }

[executor.model.launch]
preload = []
env = { A = "1" }
"""


JOIN = '{ engine = "join", bind = "127.0.0.1", ranks_per_node = 2, port = 29500 }'


def test_a_toml_tree_has_executors_with_all_their_options() -> None:
    (child,) = phalanx.tree_from_toml(EXECUTORS).child_specs

    assert (child.id, child.restart, child.type) == ("model", "transient", "supervisor")


@pytest.mark.parametrize("devices", ['"gpus"', '{ names = "gpus", per_rank = 0.5 }'])
def test_a_pool_in_a_toml_tree_is_the_one_of_that_name(devices: str) -> None:
    text = EXECUTORS.replace("args = [", f"devices = {devices}\nargs = [")
    with phalanx.DevicePool.of("auto", 2, FakeGpus(2), {}) as two:
        phalanx.tree_from_toml(text, {"gpus": two})
    with (
        phalanx.DevicePool.of("auto", 1, FakeGpus(1), {}, devices_per_rank=0.25) as one,
        pytest.raises(SpecError) if devices == '"gpus"' else contextlib.nullcontext(),
    ):
        phalanx.tree_from_toml(text, {"gpus": one})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("policy = {", 'policy = { decider = "mine",'),
        ("policy = {", 'policy = { decider = "phalanx.supervision:GPU_WORKER",'),
        ("preload = []", "preload = []\ntransport = { ipc = true, lost_after = 5.0 }"),
        ("args = [", 'cluster = { engine = "ray", ranks_per_node = 2 }\nargs = ['),
        ("args = [", f"cluster = {JOIN}\nargs = ["),
        ("args = [", 'cluster = "nodes"\nargs = ['),
    ],
)
def test_a_toml_tree_has_deciders_transports_and_clusters(old: str, new: str) -> None:
    nodes = phalanx.Ray(ranks_per_node=2)

    tree = phalanx.tree_from_toml(EXECUTORS.replace(old, new), {"mine": Decider(), "nodes": nodes})

    assert [child.id for child in tree.child_specs] == ["model"]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("policy = {", 'policy = { decider = "os:getpid",', "executor.model.policy.decider"),
        ("policy = {", 'policy = { decider = "os",', "executor.model.policy.decider"),
        ("preload = []", "transport = { ipcs = true }", "executor.model.launch.transport.ipcs"),
        (
            "preload = []",
            "transport = { lost_after = -1.0 }",
            "executor.model.transport.lost_after",
        ),
        ("args = [", "cluster = { port = 1 }\nargs = [", "executor.model.cluster.engine"),
        ("args = [", 'cluster = { engine = "slurm" }\nargs = [', "executor.model.cluster.engine"),
        (
            "args = [",
            'cluster = { engine = "ray", port = 1 }\nargs = [',
            "executor.model.cluster.port",
        ),
        ("args = [", 'cluster = "os:getpid"\nargs = [', "executor.model.cluster"),
        ("tests.support.workers:Echo", "tests.support.workers:None", "executor.model.worker"),
        ("tests.support.workers:Echo", "os:getpid", "executor.model.worker"),
        ("world_size = 2", "world_size = 0", "executor.model.world_size"),
        ("args = [", 'args = ["hello", ', "executor.model.args"),
        ("world_size = 2", "worldsize = 2", "executor.model.worldsize"),
        ("start = 20.0", "starts = 20.0", "executor.model.limits.starts"),
        ("args = [", "checkpoint = { every = 3 }\nargs = [", "executor.model.checkpoint.every"),
        ("initial = 0.5", "initial = -1", "executor.model.initial"),
        ("args = [", 'devices = { names = "a" }\nargs = [', "executor.model.devices"),
    ],
)
def test_a_bad_executor_in_a_toml_tree_names_the_place(old: str, new: str, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        phalanx.tree_from_toml(EXECUTORS.replace(old, new))

    assert caught.value.field == field
