"""Executors whose ranks live on nodes: all that one machine promises, and lost nodes."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoint_workers import Announcer, Counter
from tests.support.disturbed_nodes import RelayedNodes
from tests.support.hanging_workers import Stuck
from tests.support.node_engine import ONE_ZYGOTE, LocalEngine, LocalNodes
from tests.support.node_groups import kill
from tests.support.processes import LONG, is_alive, wait_until
from tests.support.rank_faults import wait_healed
from tests.support.relayed_links import processes_of
from tests.support.survivors import Keeper
from tests.support.workers import Echo, LateAgain, NotesStarts, Reducer, StartFails

from phalanx.actors import CheckpointPolicy, Devices, Executor, Launch, Limits, RestartPolicy
from phalanx.cluster import NodeFenced, NodeJoined, NodeLost, NodeQuarantined
from phalanx.errors import (
    ExecutorClosed,
    NoNode,
    SpecError,
    StartFailed,
    Unhealthy,
    WorkerDied,
)
from phalanx.events import CheckpointRejected, Emitted
from phalanx.runtime import (
    Lost,
    Observer,
    ReportFolder,
    Runtime,
    Vitals,
    WorkerExited,
    Zmq,
    find_drivers,
    first_picture,
    process_tree,
    procfs,
)
from phalanx.supervision import Intensity, Strategy

TIMEOUT = 3.0  # seconds of silence that make a node lost
MANY = Intensity(100, 60.0)
TORCH = Launch(preload=("torch",))

Make = Callable[..., "Nodes"]


class Nodes:
    """An executor on local nodes, and what it has told."""

    def __init__(self, runtime: Runtime, worker: Any, size: int, **given: Any) -> None:
        names = ("ranks_per_node", "spare_nodes", "node_timeout", "node_wait", "engine_options")
        own = {name: given.pop(name) for name in names if name in given}
        usual: dict[str, Any] = {"ranks_per_node": 2, "node_timeout": TIMEOUT, "node_wait": LONG}
        own = {**usual, **own}
        self.options: LocalNodes = given.pop("kind", LocalNodes)(**own)
        given = {"launch": ONE_ZYGOTE, "devices": "cpu", "intensity": MANY, **given}
        self.group = Executor(worker, size, cluster=self.options, runtime=runtime, **given)
        self.events: list[Any] = []
        self.group.subscribe(self.events.append)

    @property
    def engine(self) -> LocalEngine:
        return self.options.engines[0]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def node_of(self, rank: int) -> int:
        return next(each.node for each in self.group.status().nodes if rank in each.ranks)

    def processes(self, node: int) -> dict[int, Any]:
        place = self.engine.starters[node]._tag.pattern
        return dict(process_tree.find(process_tree.TreeTarget(place))[0])

    def lose(self, node: int) -> None:
        """Kill the process of *node*, and wait until that is known."""
        kill(self.engine.pid_of(node))
        wait_until(lambda: node in {each.node for each in self.of(NodeLost)})

    def freeze(self, node: int) -> None:
        """Stop everything of *node*, which cannot tell of it."""
        self.engine.mute(node)
        for _ in range(2):  # what was being started meanwhile
            for pid in self.processes(node):
                os.kill(pid, signal.SIGSTOP)


@pytest.fixture
def nodes(runtime: Runtime) -> Iterator[Make]:
    """Makes executors on nodes, and closes them."""
    made: list[Nodes] = []

    def make(worker: Any = Echo, size: int = 4, **given: Any) -> Nodes:
        made.append(Nodes(given.pop("runtime", runtime), worker, size, **given))
        return made[-1]

    yield make
    for each in made:
        each.group.close()


def test_large_arguments_and_every_shape_of_call_reach_ranks_on_nodes_and_a_close_leaves_nothing(
    nodes: Make,
) -> None:
    greeting = "x" * 40_000_000
    made = nodes(args=(greeting,))
    group = made.group

    def count(_worker: Any, most: int) -> Iterator[int]:
        yield from range(most)

    assert group.collective_rpc(lambda worker: len(worker.greeting)) == [len(greeting)] * 4
    assert group.collective_rpc("rank") == [0, 1, 2, 3]
    assert group.collective_rpc("echo", args=(b"x" * 3_000_000,)) == [b"x" * 3_000_000] * 4
    assert group.scatter("echo", args=[("a",), ("b",), ("c",), ("d",)]) == ["a", "b", "c", "d"]
    assert group.call("rank", rank=3) == 3
    assert group.submit("again", args=(5,)).result(LONG) == 5
    assert [each.value for each in group.gather("rank")] == [0, 1, 2, 3]
    futures = [group.collective_rpc("echo", args=(i,), non_block=True) for i in range(50)]
    assert [each.result(LONG) for each in futures] == [[i] * 4 for i in range(50)]
    assert list(group.stream(count, args=(200,), rank=1)) == list(range(200))
    with pytest.raises(ValueError, match="boom"):
        group.collective_rpc("fail", args=(2,))

    group.collective_rpc("grandchild", kwargs={"daemon": True})
    came = {pid for node in made.engine.starters for pid in made.processes(node)}
    assert len(came) > 12
    group.close()
    assert not any(is_alive(pid) for pid in came)


def test_ranks_are_told_where_they_are_and_have_locks_of_their_node_alone(
    nodes: Make, torch_runtime: Runtime
) -> None:
    group = nodes(Reducer, 4, runtime=torch_runtime, launch=TORCH).group

    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    env = group.collective_rpc(lambda worker: [os.environ[name] for name in names])

    assert [each[:2] for each in env] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    assert [each[2:] for each in env] == [["2", "0", "2"]] * 2 + [["2", "1", "2"]] * 2
    assert group.collective_rpc(lambda worker: worker.ctx.local_rank) == [0, 1, 0, 1]
    assert group.collective_rpc("total", args=(1.0,)) == [10.0] * 4

    def locked(worker: Any, scope: str) -> int:
        with worker.ctx.lock("cache", 10.0, scope=scope):
            return 1

    with pytest.raises(SpecError, match="scope='node'"):
        group.collective_rpc(locked, args=("group",))
    assert group.collective_rpc(locked, args=("node",)) == [1] * 4


def test_a_rank_that_dies_is_restarted_on_its_node_and_what_it_said_last_is_in_its_report(
    nodes: Make,
) -> None:
    made = nodes(strategy=Strategy.ONE_FOR_ONE)
    group, before = made.group, made.node_of(1)
    group.collective_rpc("say", args=("its last",))

    with pytest.raises(WorkerDied):
        group.collective_rpc("kill_self", args=(1, signal.SIGSEGV))
    assert group.collective_rpc("rank", retries=3) == [0, 1, 2, 3]

    status = group.status()
    report = status.reports[0]
    assert (report.rank, report.reason.signal) == (1, signal.SIGSEGV)
    assert (report.lost, report.node, report.fenced) == (Lost.RANK, before, "")
    assert report.evidence.rusage["ru_maxrss"] > 0
    assert status.restarts == 1
    assert made.node_of(1) == before
    assert made.of(NodeLost) == []
    assert "its last" in report.stdout
    assert "its last" in report.stderr
    assert any("its last" in line for line in report.logs)
    assert "Segmentation fault" in report.last_words


def test_what_ranks_on_nodes_write_is_shown_as_it_comes(capfd: pytest.CaptureFixture[str]) -> None:
    shown = ""

    def has(*parts: str) -> bool:
        nonlocal shown
        shown += "".join(capfd.readouterr())
        return all(part in shown for part in parts)

    with Runtime(console="text", level="info") as runtime:
        made = Nodes(runtime, Echo, 2, ranks_per_node=1, name="tp")
        with made.group as group:
            group.collective_rpc("say", args=("hello",))
            heads = [f"[tp/{each.rank} #1 {each.pid}] " for each in group.ranks]
            wait_until(lambda: has(*(f"{head}hello" for head in heads), "said", "text=hello"))
            group.collective_rpc(lambda worker: print("é\udc80" + "x" * 300_000, flush=True))
            wait_until(lambda: has("bytes were dropped", "x" * 1000))
            group.collective_rpc("say", args=("goodbye",))
            wait_until(lambda: has(*(f"{head}goodbye" for head in heads)))


def test_strangers_that_hold_every_descriptor_of_the_gateway_keep_no_rank_from_its_restart(
    nodes: Make,
) -> None:
    made = nodes(size=2)
    owner: Any = made.engine._events[0]
    gateway = owner._gateway
    host, _, port = gateway.endpoint.removeprefix("tcp://").rpartition(":")
    _, most = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    used = len(list(Path(f"/proc/{gateway.pid}/fd").iterdir()))
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (used + 20, most))

    with contextlib.ExitStack() as held:
        for _ in range(60):
            held.enter_context(socket.create_connection((host, int(port)), LONG))
        kill(made.group.ranks[0].pid or 0)
        wait_until(lambda: made.group.status().restarts == 1)

        assert made.group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1]
    assert made.group.status().restarts == 1
    assert made.of(NodeLost) == []


def test_a_rank_that_hangs_on_a_node_is_ended_with_its_stacks(nodes: Make) -> None:
    group = nodes(Stuck, 2, hang_after=1.0).group

    with pytest.raises(WorkerDied, match="hang_after"):
        group.collective_rpc("hang", args=("released", None, 1))

    report = group.status().reports[0]
    assert "_released" in report.stacks
    assert f"thread {report.pid} (" in report.stacks  # what the kernel sees


def test_a_rank_that_is_stopped_on_a_node_is_found_so(nodes: Make) -> None:
    group = nodes(Stuck, 2, limits=Limits(stopped=2.0)).group

    with pytest.raises(WorkerDied, match="stopped for"):
        group.collective_rpc("hang", args=("stop", None, 0), timeout=LONG)
    assert group.collective_rpc("rank", retries=3) == [0, 1]

    os.kill(group.ranks[0].pid or 0, signal.SIGSTOP)
    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1]
    wait_healed(group, 2)  # it goes on for its stacks, and may answer before it ends
    assert "stopped for" in str(group.status().reports[-1].reason)


def test_a_start_that_fails_on_a_node_is_told_with_its_exception(nodes: Make) -> None:
    with pytest.raises(StartFailed) as failed:
        nodes(StartFails, 2, args=("raise",))

    assert isinstance(failed.value.__cause__, ValueError)
    assert "bad weights" in str(failed.value.__cause__)


def test_a_group_on_nodes_grows_and_shrinks(nodes: Make) -> None:
    made = nodes(size=2)
    group = made.group

    group.resize(5, timeout=LONG)
    assert group.collective_rpc("rank") == [0, 1, 2, 3, 4]
    assert sorted(len(each.ranks) for each in group.status().nodes if each.ranks) == [1, 2, 2]
    group.resize(1, timeout=LONG)

    assert group.collective_rpc("rank") == [0]
    wait_until(lambda: len(group.status().nodes) == 1)
    group.restart(timeout=LONG)
    assert group.collective_rpc("rank") == [0]


def test_a_node_that_has_not_the_code_is_told_of_with_a_remedy(
    nodes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from phalanx import WorkerActor\nclass Here(WorkerActor):\n    def one(self): return 1\n"
    )
    (tmp_path / "only_here.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    worker = importlib.import_module("only_here").Here

    with pytest.raises(StartFailed, match="runtime_env") as failed:
        nodes(worker, 1)

    assert "only_here" in str(failed.value.__cause__)


def test_observers_see_the_nodes_and_what_is_on_them() -> None:
    with Runtime(console=None) as runtime:
        made = Nodes(runtime, Echo, 3, spare_nodes=1)
        with made.group as group:
            wait_until(lambda: len(group.status().nodes) == 3)
            (driver,) = (each for each in find_drivers() if each.pid == os.getpid())
            with Observer(driver, watch=True) as observer:
                (seen,) = first_picture(observer, driver, LONG).groups

            told = [(each["node"], each["state"], tuple(each["ranks"])) for each in seen["nodes"]]
            ages = [each["beat_age"] for each in seen["nodes"]]
            assert all(0.0 <= age < TIMEOUT for age in ages), ages
            assert [each["devices"] for each in seen["nodes"]] == [[], [], []]
            assert told == [(each.node, each.state, each.ranks) for each in group.status().nodes]
            assert {rank["host"] for rank in seen["ranks"]} == {os.uname().nodename}
            assert {rank["rss_bytes"] for rank in seen["ranks"]} == {None}  # of another machine


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.ONE_FOR_ONE])
def test_a_node_that_is_lost_counts_as_one_restart_of_one_epoch(
    nodes: Make, strategy: Strategy
) -> None:
    made = nodes(strategy=strategy, spare_nodes=1, intensity=Intensity(1, 60.0))
    group = made.group
    victim, well = made.node_of(2), made.node_of(0)

    made.lose(victim)
    assert group.collective_rpc("rank", retries=3) == [0, 1, 2, 3]

    status = group.status()
    assert status.restarts == 1
    assert status.epoch == (2 if strategy is Strategy.ONE_FOR_ALL else 1)
    assert {report.rank for report in status.reports} == {2, 3}
    for report in status.reports:
        assert f"node {victim} (" in str(report.reason)
    assert made.node_of(0) == well
    assert made.node_of(2) not in (victim, well)
    (lost,) = made.of(NodeLost)
    assert lost.ranks == (2, 3)
    wait_until(lambda: [event.node for event in made.of(NodeFenced)] == [victim])


@pytest.mark.parametrize("what", ["gateway", "relay"])
def test_the_end_of_a_process_that_links_many_ranks_is_one_restart_whatever_the_strategy(
    nodes: Make, what: str
) -> None:
    made = nodes(strategy=Strategy.ONE_FOR_ONE, intensity=Intensity(1, 60.0))
    group = made.group
    around = made.processes(made.node_of(2)) if what == "relay" else processes_of(group, what)
    (victim,) = (pid for pid in around if procfs.command(pid).rstrip().endswith(what))

    kill(victim)

    wait_healed(group)
    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1, 2, 3]
    assert group.status().restarts == 1
    lost = {2, 3} if what == "relay" else {0, 1, 2, 3}
    assert {report.rank for report in group.status().reports} == lost


def test_a_silent_node_is_lost_at_its_timeout_nothing_runs_twice_and_its_report_is_completed(
    nodes: Make, tmp_path: Path
) -> None:
    made = nodes(spare_nodes=1, policy=RestartPolicy(report_dir=tmp_path))
    group, victim = made.group, made.node_of(2)
    old = [each.pid or 0 for each in group.ranks[2:]]

    began = time.monotonic()
    made.freeze(victim)
    with pytest.raises(WorkerDied) as died:
        group.collective_rpc("rank", timeout=LONG)

    told = died.value.report
    assert (told.lost, told.node, told.fenced) == (Lost.NODE, victim, "")
    assert f"node {victim}, with all of its ranks; not yet fenced" in told.render()
    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1, 2, 3]
    assert time.monotonic() - began >= TIMEOUT
    assert not any(is_alive(pid) for pid in old)  # they ended before others were started
    assert [event.node for event in made.of(NodeLost)] == [victim]
    assert group.status().restarts == 1
    wait_until(lambda: all(report.fenced for report in group.status().reports))
    wait_until(lambda: made.of(NodeFenced))
    assert {report.fenced for report in group.status().reports} == {made.of(NodeFenced)[0].why}
    group.close()  # which writes what is left
    files = [file.report for file in ReportFolder.at(tmp_path).read()]
    assert {report and (report.rank, report.fenced) for report in files} == {
        (rank, made.of(NodeFenced)[0].why) for rank in (2, 3)
    }
    assert len(files) == 2


def test_a_group_for_which_no_machine_is_found_ends_and_says_so(nodes: Make) -> None:
    made = nodes(size=2, ranks_per_node=1, engine_options={"slots": 2}, node_wait=2.0)
    taken = made.engine
    victim = made.node_of(1)
    taken._free = [-1]  # nothing is given back to it
    taken._offer = lambda: None  # type: ignore[method-assign]

    made.lose(victim)
    with pytest.raises((WorkerDied, ExecutorClosed)) as ended:
        made.group.collective_rpc("rank", timeout=LONG, retries=3)

    causes = [ended.value, ended.value.__cause__]
    assert any(isinstance(cause, NoNode) for cause in causes), causes
    reason = made.group.wait_closed(LONG)
    assert reason is not None
    assert "gave up: " in reason.detail


def test_a_group_whose_ranks_have_a_spare_outlives_the_wait_for_another_machine(
    nodes: Make,
) -> None:
    made = nodes(
        size=2, ranks_per_node=1, spare_nodes=1, engine_options={"slots": 3}, node_wait=1.0
    )
    wait_until(lambda: [each.state for each in made.group.status().nodes] == ["up"] * 3)
    victim = made.node_of(1)
    made.engine.mute(victim)  # so it is fenced by its lease, when that wait is over

    made.lose(victim)

    assert made.group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1]
    assert made.group.status().restarts == 1


def test_a_silent_node_is_shown_by_the_age_of_its_last_beat_and_loses_nothing_before_its_timeout(
    nodes: Make,
) -> None:
    made = nodes(size=2, node_timeout=LONG)
    group, before = made.group, [each.pid for each in made.group.ranks]

    def age() -> float:
        (node,) = group.status().nodes
        return LONG if node.beat_age is None else node.beat_age

    stopped = list(made.processes(made.node_of(0)))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    future = group.collective_rpc("rank", non_block=True)
    wait_until(lambda: 2.0 < age() < LONG)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)

    assert future.result(LONG) == [0, 1]
    wait_until(lambda: age() < 2.0)
    assert [each.pid for each in group.ranks] == before
    assert group.status().restarts == 0


def test_ranks_that_are_to_end_while_their_node_is_silent_are_awaited_until_it_is_heard(
    nodes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.actors.group.shutdown._KILL_LIMIT", 0.5)
    made = nodes(intensity=Intensity(1, 60.0), node_timeout=LONG)
    group = made.group
    stopped = list(made.processes(made.node_of(0)))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    kill(group.ranks[2].pid or 0)
    wait_until(lambda: max(each.beat_age or 0.0 for each in group.status().nodes) > 3.0)
    node = made.engine.pid_of(made.node_of(0))
    for pid in sorted(stopped, key=lambda pid: pid == node):  # last: it ends and reaps the others
        os.kill(pid, signal.SIGCONT)

    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1, 2, 3]
    assert group.status().restarts == 1
    assert {each.incarnation for each in group.ranks} == {2}
    assert not any("withstood" in str(each.reason) for each in made.of(WorkerExited))


def test_survivors_on_other_nodes_are_kept_and_told_of_a_silent_loss(
    nodes: Make, torch_runtime: Runtime
) -> None:
    made = nodes(
        Keeper,
        4,
        spare_nodes=1,
        policy=RestartPolicy(survivors="keep", leave_within=10.0),
        runtime=torch_runtime,
        launch=TORCH,
    )
    group = made.group
    assert group.collective_rpc("total") == [4.0] * 4
    victim = made.node_of(2)
    before = group.collective_rpc("kept")

    made.freeze(victim)
    future = group.collective_rpc("total", non_block=True, retries=3)
    assert future.result(LONG) == [4.0] * 4

    after = group.collective_rpc("kept")
    assert [each[2] for each in after[:2]] == [each[2] for each in before[:2]]
    assert [each[0] for each in after] == [1, 1, 1, 1]
    assert {each[3] for each in after} == {2}
    assert group.status().restarts == 1


def test_states_survive_the_node_that_took_them(nodes: Make) -> None:
    made = nodes(
        Counter,
        4,
        spare_nodes=1,
        checkpoint=CheckpointPolicy(every_calls=1),
        strategy=Strategy.ONE_FOR_ONE,
    )
    group = made.group
    for _ in range(3):
        group.collective_rpc("add")
    group.checkpoint()

    made.lose(made.node_of(3))

    assert group.collective_rpc("add", retries=3) == [4, 4, 4, 4]


def test_a_node_that_is_lost_while_its_rank_restores_its_state_costs_no_snapshot(
    nodes: Make, tmp_path: Path
) -> None:
    when = tmp_path / "when"
    made = nodes(
        Announcer,
        2,
        ranks_per_node=1,
        spare_nodes=1,
        args=({"restore": "hang"}, str(when)),
        checkpoint=CheckpointPolicy(every_calls=1),
    )
    for _ in range(2):
        made.group.collective_rpc("add")
    when.touch()
    kill(made.group.ranks[0].pid or 0)
    wait_until(lambda: len(made.of(Emitted)) == 2)

    kill(made.engine.pid_of(made.node_of(1)))
    when.unlink()  # before any rank is started anew

    assert made.group.collective_rpc("add", timeout=LONG) == [3, 3]
    assert not made.of(CheckpointRejected)


def test_health_does_not_take_the_number_of_a_ranks_process_for_one_of_this_machine(
    nodes: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, mark = nodes(Stuck, 2, ranks_per_node=1), tmp_path / "mark"
    made.group.tell("hang", args=("deadlock", str(mark), 1), rank=1)
    wait_until(mark.exists)
    absent = Vitals()
    monkeypatch.setattr(Vitals, "of", lambda _pid: absent)  # no process here has that number

    with pytest.raises(Unhealthy) as silent:
        made.group.check_health(1.0)

    assert silent.value.states == {1: "waiting"}
    made.group.kill()  # it would not end if it were asked to


@pytest.mark.soak
def test_a_node_that_is_lost_while_its_ranks_start_is_replaced_within_the_same_start(
    nodes: Make, gate: Path
) -> None:
    made = nodes(LateAgain, 4, args=(str(gate),), spare_nodes=2)
    group = made.group
    kill(group.ranks[0].pid or 0)
    wait_until(lambda: group.ranks[0].incarnation == 2 and group.ranks[0].pid)

    made.lose(made.node_of(0))
    gate.touch()

    assert group.collective_rpc("rank", timeout=LONG, retries=5) == [0, 1, 2, 3]
    assert group.status().restarts <= 2


def test_a_node_that_is_lost_while_ranks_of_another_start_with_its_own_is_replaced(
    nodes: Make, tmp_path: Path
) -> None:
    made = nodes(
        NotesStarts, args=(str(tmp_path),), spare_nodes=2, node_timeout=LONG, kind=RelayedNodes
    )
    group = made.group
    wait_until(lambda: [each.state for each in group.status().nodes] == ["up"] * 4)
    late, early = [each.node for each in group.status().nodes if not each.ranks]
    assert isinstance(made.options, RelayedNodes)
    heal = made.options.disturb(late, 0.0, math.inf)  # so it does not tell that it has started them

    for node in (made.node_of(0), made.node_of(2)):
        kill(made.engine.pid_of(node))
    wait_until(lambda: len(list(tmp_path.glob("*#2"))) == 4)
    made.lose(early)
    heal()

    assert group.collective_rpc("rank", timeout=LONG, retries=5) == [0, 1, 2, 3]
    assert group.status().restarts <= 3


def test_a_machine_serves_again_after_a_loss_and_is_put_aside_after_the_second(nodes: Make) -> None:
    made = nodes(size=1, ranks_per_node=1, engine_options={"slots": 1})

    made.lose(made.node_of(0))  # its machine is free again once it has been fenced
    assert made.group.collective_rpc("rank", timeout=LONG, retries=5) == [0]
    assert len(made.of(NodeJoined)) == 1  # the first one came before this was heard
    made.lose(made.node_of(0))

    wait_until(lambda: made.of(NodeQuarantined))
    assert made.of(NodeQuarantined)[0].seconds > 1.0
    assert made.of(NodeQuarantined)[0].host == socket.gethostname()


def test_calls_go_on_while_a_spare_node_is_lost(nodes: Make) -> None:
    made = nodes(size=2, spare_nodes=1)
    spare = next(each.node for each in made.group.status().nodes if not each.ranks)
    wait_until(lambda: made.of(NodeJoined) or made.group.status().nodes[spare].state == "up")
    made.lose(spare)

    assert made.group.collective_rpc("rank") == [0, 1]
    assert made.group.status().restarts == 0


def test_a_close_ends_a_start_that_waits_for_machines(nodes: Make) -> None:
    made = nodes(size=2, ranks_per_node=1, engine_options={"slots": 2})
    made.engine._offer = lambda: None  # type: ignore[method-assign]
    made.lose(made.node_of(1))

    made.group.close()

    with pytest.raises(ExecutorClosed):
        made.group.collective_rpc("rank")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"cluster": "ray"}, "cluster"),
        ({"launch": "inline", "world_size": 1}, "launch.method"),
        ({"launch": Launch(transport=Zmq())}, "launch.transport"),
        ({"launch": Launch(stdio="inherit")}, "launch.stdio"),
        ({"standby": 1}, "policy.standby"),
        ({"devices": [0, 1]}, "devices.names"),
        ({"devices": Devices(visibility="all")}, "devices.visibility"),
    ],
)
def test_what_ranks_on_a_cluster_cannot_have_is_refused_by_name(
    runtime: Runtime, given: dict[str, Any], field: str
) -> None:
    given = {"world_size": 2, "cluster": LocalNodes(ranks_per_node=1), **given}

    with pytest.raises(SpecError, match=f"^{field}="):
        Executor(Echo, runtime=runtime, **given)
