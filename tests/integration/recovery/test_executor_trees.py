"""Executors and their rank groups as children in a bigger tree, on real worker processes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint_workers import Sluggish
from tests.support.processes import wait_until
from tests.support.rank_faults import OFTEN, kill
from tests.support.supervised_actors import in_sub_process
from tests.support.transport import TRANSPORT
from tests.support.workers import Echo, StartFails, StartsLate, wait_for

from phalanx.actors import (
    CheckpointPolicy,
    Executor,
    Launch,
    Supervisor,
    executor_child,
    worker_child,
)
from phalanx.actors.api.lasting_executor import SupervisedExecutor
from phalanx.runtime import Runtime
from phalanx.supervision import (
    CallTimeout,
    ChildRefused,
    ChildSpec,
    ExecutorClosed,
    ExitReason,
    Intensity,
    Restart,
    RuntimeFault,
    SpecError,
    StartFailed,
    SupervisorDown,
    SupervisorSpec,
    WorkerDied,
)

LONG = 30.0
Grow = Callable[..., Supervisor]
Child = Callable[..., ChildSpec]


@pytest.fixture
def child(runtime: Runtime) -> Child:
    options: Any = {"runtime": runtime, "launch": Launch(preload=(), transport=TRANSPORT)}
    return partial(executor_child, intensity=Intensity(0, 60.0), **options)


@pytest.fixture
def grow() -> Iterator[Grow]:
    """Builds trees of these children."""
    trees: list[Supervisor] = []

    def build(*children: ChildSpec | SupervisorSpec, **options: Any) -> Supervisor:
        options.setdefault("intensity", OFTEN)
        trees.append(Supervisor(SupervisorSpec("root", children=children, **options)))
        return trees[-1]

    yield build
    for tree in trees:
        tree.close()


def executor(tree: Supervisor, path: str) -> Executor[Any]:
    """Return it once it is there."""
    deadline = time.monotonic() + LONG
    while True:
        try:
            found: Executor[Any] = tree.child(path)
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        else:
            return found


def replaced(tree: Supervisor, path: str, before: Executor[Any]) -> Executor[Any]:
    wait_until(lambda: executor(tree, path) is not before)
    return executor(tree, path)


def test_executors_serve_as_children_and_stop_with_their_tree(grow: Grow, child: Child) -> None:
    tree = grow(child("a", Echo, 2), child("b", Echo, 1))
    a, b = executor(tree, "a"), executor(tree, "b")

    assert a.collective_rpc("rank", LONG) == [0, 1]
    assert b.name == "root/b"
    tree.close()

    assert a.status().state == b.status().state == "ended"


def test_calls_of_a_lasting_handle_wait_while_the_supervisor_restarts_its_executor(
    grow: Grow, child: Child
) -> None:
    tree = grow(child("a", Echo, 2))
    model = tree.executor("a")
    before = model.current()

    with pytest.raises(WorkerDied):  # the call was accepted, and is not made again
        model.collective_rpc("kill_self", LONG, (0,))
    assert model.collective_rpc("rank", LONG) == [0, 1]
    model.current().request_close()
    assert model.call("rank", LONG, rank=1) == 1

    assert model.current(LONG) is not before
    assert tree.exit_reason is None


def test_calls_of_a_lasting_handle_wait_while_a_supervisor_that_gave_up_is_restarted(
    grow: Grow, child: Child
) -> None:
    models = SupervisorSpec("models", intensity=Intensity(0, 60.0), children=[child("a", Echo, 1)])
    tree = grow(models)
    model = tree.executor("models/a")

    for _ in range(2):
        with pytest.raises(WorkerDied):
            model.collective_rpc("kill_self", LONG, (0,))
        assert model.collective_rpc("rank", LONG) == [0]

    assert tree.status().restarts == 2


class RefusedWithin(Echo):
    """Makes a call of another executor, which has ended."""

    def refused(self) -> None:
        self.count += 1
        raise ExecutorClosed("the one within has ended", sent=False)


def test_a_lasting_handle_does_not_make_a_call_again_whose_method_raised_that_another_was_refused(
    grow: Grow, child: Child
) -> None:
    model = grow(child("a", RefusedWithin, 1)).executor("a")

    with pytest.raises(ExecutorClosed, match="within"):
        model.collective_rpc("refused", 1.0)
    with pytest.raises(ExecutorClosed, match="within"):
        asyncio.run(model.aio.collective_rpc("refused", 1.0))

    assert model.call("add", LONG, (0,), rank=0) == 2


class StopsLate(Echo):
    def on_stop(self, reason: ExitReason) -> None:
        wait_for(self.greeting)


def test_a_call_of_a_lasting_handle_keeps_its_timeout_while_its_executor_ends(
    grow: Grow, child: Child, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    late = child("a", StopsLate, 1, args=(str(gate),), limits={"stop": {"ask": LONG}})
    tree = grow(late)
    model = tree.executor("a")
    model.current().request_close()

    with pytest.raises(CallTimeout, match="never sent"):
        model.collective_rpc("rank", 0.2)
    with pytest.raises(CallTimeout, match="never sent"):
        asyncio.run(model.aio.collective_rpc("rank", 0.2))

    assert tree.status().restarts == 0  # it is still ending
    gate.touch()
    assert model.collective_rpc("rank", LONG) == [0]


@pytest.fixture
def gated(grow: Grow, child: Child, tmp_path: Path) -> tuple[SupervisedExecutor, Path]:
    """A lasting handle, and a file without which its executor does not start."""
    gate = tmp_path / "gate"
    gate.touch()
    return grow(child("a", StartsLate, 1, args=(str(gate),))).executor("a"), gate


def test_awaited_calls_of_a_lasting_handle_wait_for_a_restart_without_blocking_the_event_loop(
    gated: tuple[SupervisedExecutor, Path],
) -> None:
    model, gate = gated

    async def run() -> list[Any]:
        values: list[Any] = []
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: model.aio.collective_rpc("echo", LONG, (1,)),
            lambda: model.proxy(rank=0, timeout=LONG).echo.aio(2),
        ]
        for call in calls:
            gate.unlink()
            await asyncio.to_thread(model.current().close)
            waits = asyncio.ensure_future(call())
            await asyncio.sleep(0)  # it has begun, and has no executor to call
            gate.touch()
            values.append(await waits)
        await model.aio.tell("echo", args=("quiet",))
        return values

    assert asyncio.run(run()) == [[1], 2]


def test_an_awaited_call_of_a_lasting_handle_keeps_its_timeout_where_no_thread_is_free(
    gated: tuple[SupervisedExecutor, Path],
) -> None:
    model, gate = gated
    gate.unlink()
    model.current().close()
    free = threading.Event()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, free.wait)
        try:
            with pytest.raises(CallTimeout):
                await asyncio.wait_for(model.aio.collective_rpc("echo", 0.1, (1,)), LONG / 3)
        finally:
            free.set()
            gate.touch()
        await busy
        assert await model.aio.collective_rpc("echo", LONG, (2,)) == [2]

    asyncio.run(run())


def test_a_lasting_handle_refuses_a_wrong_timeout_and_says_that_nothing_restarts_its_executor(
    grow: Grow, child: Child
) -> None:
    tree = grow(child("a", Echo, 1))
    model = tree.executor("a")

    with pytest.raises(SpecError, match="seconds >= 0"):
        model.collective_rpc("rank", -1.0)
    tree.terminate_child("a", timeout=LONG)
    with pytest.raises(ChildRefused, match="not_running"):
        model.collective_rpc("rank", LONG)
    tree.close()

    with pytest.raises(SupervisorDown, match="the tree root has ended: shutdown"):
        model.collective_rpc("rank", LONG)


def test_an_executor_that_served_calls_before_each_of_its_deaths_has_been_of_use(
    grow: Grow, child: Child
) -> None:
    tree = grow(child("a", Echo, 1), fruitless_limit=1)

    for _ in range(3):
        before = executor(tree, "a")
        for _ in range(2):  # a rank notes that it served a call after it has answered it
            assert before.collective_rpc("rank", LONG) == [0]
        kill(before)
        replaced(tree, "a", before)

    assert tree.exit_reason is None


@pytest.mark.parametrize(("code", "restarted"), [(0, False), (3, True)])
def test_a_single_worker_is_restarted_by_its_type(
    grow: Grow, runtime: Runtime, code: int, restarted: bool
) -> None:
    launch = Launch(preload=(), transport=TRANSPORT)
    tree = grow(worker_child("w", Echo, restart=Restart.TRANSIENT, runtime=runtime, launch=launch))
    before = executor(tree, "w")
    before.tell("exit_by", args=("sys", code))

    if restarted:
        assert replaced(tree, "w", before).collective_rpc("rank", LONG) == [0]
    else:
        wait_until(lambda: tree.count_children().active == 0)
        assert before.wait_closed(LONG)


def fail_on_the_device(_: Any) -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_single_worker_that_a_cuda_error_ends_is_restarted_by_its_supervisor(
    grow: Grow, runtime: Runtime
) -> None:
    launch = Launch(preload=(), transport=TRANSPORT)
    tree = grow(worker_child("w", Echo, runtime=runtime, launch=launch))
    before = executor(tree, "w")

    with pytest.raises(RuntimeError, match="device-side assert"):
        before.collective_rpc(fail_on_the_device, LONG)

    assert before.wait_closed(LONG)
    assert replaced(tree, "w", before).collective_rpc("rank", LONG) == [0]
    assert tree.status().children[0].incarnation == 2


def test_the_shared_runtime_lives_as_long_as_the_tree_so_that_a_restart_imports_nothing_again(
    grow: Grow,
) -> None:
    launch = Launch(preload=(), transport=TRANSPORT)
    tree = grow(executor_child("a", Echo, 1, launch=launch))
    before = executor(tree, "a")
    tree.terminate_child("a")
    assert before.wait_closed(LONG)

    assert tree.restart_child("a")

    after = executor(tree, "a")
    assert after.group.runtime is before.group.runtime
    assert after.collective_rpc("rank", LONG) == [0]
    tree.close()
    assert after.wait_closed(LONG)  # it has released the runtime, as the tree has
    with pytest.raises(RuntimeFault, match="closed"):
        Executor(Echo, 1, launch=launch, runtime=before.group.runtime)


def test_a_tree_that_gives_up_says_so_where_and_as_its_executors_log() -> None:
    done = in_sub_process("""
        import os
        from tests.support.workers import Echo
        from phalanx.actors import executor_child
        from phalanx.runtime import Runtime
        from phalanx.supervision import Intensity, Supervisor, SupervisorSpec
        runtime = Runtime(console="json", stream=False)
        never = Intensity(0, 60.0)
        options = {"intensity": never, "launch": {"preload": ()}}
        child = executor_child("a", Echo, 1, runtime=runtime, **options)
        top = Supervisor(SupervisorSpec("root", intensity=never, children=[child]))
        os.kill(top.child("a").ranks[0].pid, 9)
        top.wait_closed(30)
        top.close()
        runtime.close()
    """)

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    records = [json.loads(line) for line in done.stderr.splitlines()]
    levels = {record["event"]: record["level"] for record in records}
    assert levels["phalanx.group_ended"] == "error"
    assert levels["phalanx.supervisor_gave_up"] == "critical"


def test_a_start_that_fails_starts_nothing_of_the_tree(child: Child) -> None:
    bad = child("bad", StartFails, 1, kwargs={"how": "raise"})

    with pytest.raises(StartFailed, match="bad"):
        Supervisor(SupervisorSpec("root", children=[child("good", Echo, 1), bad]))


def test_specs_of_executors_are_checked_when_they_are_built() -> None:
    with pytest.raises(SpecError, match="name"):
        executor_child("a", Echo, 1, name="x")
    with pytest.raises(SpecError, match="launch"):
        executor_child("a", Echo, 1, launch="inline")


def test_a_start_that_is_given_up_ends_and_leaves_the_state_to_the_next(
    child: Child, tmp_path: Path
) -> None:
    slow, begun = tmp_path / "slow", tmp_path / "begun"
    saving = CheckpointPolicy(every_calls=1)
    model = child("m", Sluggish, args=(str(slow), str(begun)), checkpoint=saving)
    spec = SupervisorSpec("root", children=[model], intensity=OFTEN)
    with Supervisor(spec) as tree:
        assert executor(tree, "m").collective_rpc("add", LONG) == [1]
        slow.touch()
        kill(executor(tree, "m"))
        wait_until(begun.exists)  # its next start

        tree.kill()
    slow.unlink()

    with Supervisor(spec) as tree:
        assert executor(tree, "m").collective_rpc("add", LONG) == [2]
