"""Which ranks a call goes to, and what each of them is given."""

from __future__ import annotations

import asyncio
import importlib
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs
from tests.support.options import Make
from tests.support.processes import wait_until
from tests.support.workers import Echo, wait_for

from phalanx.actors import Layout, idempotent, method
from phalanx.runtime import Runtime
from phalanx.supervision import CallTimeout, SpecError, UnknownMethod


def test_each_shape_of_call_reaches_the_ranks_that_it_is_for(make: Make) -> None:
    ex = make(world_size=3)

    assert ex.scatter("echo", args=[("a",), ("b",), ("c",)]) == ["a", "b", "c"]
    assert ex.collective_rpc("echo", args=([1, 2, 3],)) == [[1, 2, 3]] * 3  # no guess from a length
    with pytest.raises(SpecError, match="args"):
        ex.scatter("echo", args=[(1,)])
    wrongs: tuple[dict[str, Any], ...] = ({"args": [(), 0, ()]}, {"kwargs": [{}, 0, {}]})
    for wrong in wrongs:
        with pytest.raises(SpecError, match=r"args\[1\]=0"):
            ex.scatter("echo", **wrong)

    who = [ex.submit(lambda w, i: (i, w.ctx.rank), args=(i,)) for i in range(40)]
    answers = [future.result(30) for future in who]
    assert [i for i, _ in answers] == list(range(40))
    assert {rank for _, rank in answers} == {0, 1, 2}  # idle ranks share the queue

    outcomes = ex.gather("fail", args=(1,))
    assert [o.ok for o in outcomes] == [True, False, True]
    assert [o.value for o in outcomes] == [0, None, 2]
    assert isinstance(outcomes[1].error, ValueError)

    ex.tell("add", args=(3,))
    ex.tell("fail")
    ex.tell("add", args=(4,), rank=1)
    assert ex.collective_rpc("add", 30, (0,)) == [3, 7, 3]


@pytest.mark.parametrize("launch", ["zygote", "inline"])
def test_what_a_tell_fails_with_is_logged(
    make: Make, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    with capture_logs() as logged:
        # The runtime's own logger is not of the user's configuration; here it is.
        monkeypatch.setattr(runtime.collector, "_log", structlog.get_logger())
        ex = make(world_size=1, name="told", launch=launch)

        ex.tell("fail", args=(0,))
        ex.tell("echo", args=("quiet",))
        assert ex.collective_rpc("echo", 30, (1,)) == [1]

        ex.tell("fail", args=(0, "last"))
        wait_until(lambda: any("last" in each.get("error", "") for each in logged))

    event, _ = [each for each in logged if each["event"] == "phalanx.tell_failed"]
    assert (event["group"], event["method"], event["log_level"]) == ("told", "fail", "error")
    assert "boom" in event["error"]
    assert event["rank"] == 0
    assert "raised by rank 0 in fail" in event["notes"]
    assert launch == "inline" or "workers.py" in event["notes"]  # the remote traceback


def test_a_restart_after_the_workers_file_has_changed_is_logged(
    make: Make, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "from phalanx import WorkerActor\nclass W(WorkerActor):\n    def v(self): return {}\n"
    file = tmp_path / "versioned_worker.py"
    file.write_text(text.format(1))
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = importlib.import_module("versioned_worker").W
    with capture_logs() as logged:
        monkeypatch.setattr(runtime.collector, "_log", structlog.get_logger())
        ex = make(worker, 2, strategy="one_for_one")
        ex.restart(0)
        file.write_text(text.format(22))
        ex.restart(0)
        ex.restart(0)

    assert ex.collective_rpc("v", 30) == [22, 1]  # two versions in one group
    (told,) = [each for each in logged if each["event"] == "phalanx.worker_code_changed"]
    assert (told["file"], told["starts_run"]) == (str(file), "the new code")


class Impatient(Echo):
    @method(timeout=0.1)
    def wait(self, gate: str) -> None:
        wait_for(gate)

    @method(reply="every")
    def status(self) -> int:
        return self.ctx.rank


def test_a_proxy_has_the_workers_methods_as_they_declare_themselves(make: Make, gate: Path) -> None:
    ex = make(Impatient, world_size=None, layout=Layout(tensor=2, pipeline=2))

    proxy = ex.proxy(timeout=30)

    async def awaited() -> tuple[Any, ...]:
        return await proxy.forward.aio(9), await ex.proxy(rank=1).rank.aio()

    assert proxy.forward(7) == (2, 7)  # of the rank that has the output
    assert proxy.forward.future(8).result(30) == (2, 8)
    assert asyncio.run(awaited()) == ((2, 9), 1)
    assert proxy.rank() == 2
    assert proxy.everyone() == proxy.status() == [0, 1, 2, 3]  # one has the name of an attribute
    assert ex.status().state == "serving"
    assert proxy.drivers() == [0, 2]
    assert ex.proxy(rank=3).add(amount=5) == 5
    assert {ex.proxy(any=True).rank() for _ in range(2)} <= {0, 1, 2, 3}
    with pytest.raises(UnknownMethod):
        proxy.unheard_of()
    wrong: Any
    for wrong in ({"rank": 4}, {"retries": -1}, {"timeout": -1}, {"any": True, "rank": 0}):
        with pytest.raises(SpecError) as caught:
            ex.proxy(**wrong)
        assert caught.value.field == next(iter(wrong))
    where: Any
    for where in ({}, {"rank": 1}, {"any": True}):
        with pytest.raises(CallTimeout):
            ex.proxy(**where).wait(str(gate))
    gate.touch()


def test_former_spellings_warn_and_work(make: Make) -> None:
    ex = make(world_size=2)
    former: Any = ex

    with pytest.warns(DeprecationWarning, match=r"proxy\(\).forward"):
        assert former.forward(7) == (0, 7)
    with pytest.warns(DeprecationWarning, match=r"write proxy\(\)"):
        assert former.steps.everyone() == [0, 1]
    with pytest.warns(DeprecationWarning, match="retries=1"):
        assert former.collective_rpc("rank", on_death="retry") == [0, 1]
    with pytest.warns(DeprecationWarning, match="args="):
        assert former.submit("echo", (1,)).result(30) == 1
    with pytest.warns(DeprecationWarning, match="@method"):
        idempotent(Echo.forward)
    with pytest.raises(AttributeError), warnings.catch_warnings():
        former.rank()


def test_an_async_output_lets_the_main_loop_go_on_keeps_the_order_and_may_raise(
    make: Make, gate: Path
) -> None:
    ex = make(world_size=1)
    order: list[str] = []
    told = threading.Event()

    late = ex.collective_rpc("late", args=("late", str(gate)), non_block=True)
    counted = ex.collective_rpc("add", non_block=True)
    late.add_done_callback(lambda _: order.append("late"))
    counted.add_done_callback(lambda _: order.append("counted"))
    counted.add_done_callback(lambda _: told.set())
    ex.collective_rpc(lambda w, g: open(g, "w").close(), args=(str(gate),), non_block=True)

    assert late.result(30) == ["late"]
    assert counted.result(30) == [1]
    assert ex.collective_rpc("add", 30) == [2]
    assert told.wait(30)  # callbacks run on a thread of their own
    assert order == ["late", "counted"]
    with pytest.raises(KeyError):
        ex.collective_rpc("late", args=(KeyError("late"),))
    assert ex.collective_rpc("rank") == [0]


def test_an_answer_that_waits_for_an_async_output_is_not_changed_by_a_later_call(
    make: Make, gate: Path
) -> None:
    ex = make(world_size=1)

    late = ex.collective_rpc("late", args=("late", str(gate)), non_block=True)
    extra = ex.collective_rpc(lambda w: w.extra, non_block=True)
    ex.collective_rpc(lambda w: w.extra.update(changed=True), non_block=True)
    ex.collective_rpc(lambda w, g: open(g, "w").close(), args=(str(gate),), non_block=True)

    assert late.result(30) == ["late"]
    assert extra.result(30) == [{}]
