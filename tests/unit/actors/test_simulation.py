"""The real group, plane, health and supervisor code on a simulated kernel, in one thread."""

from __future__ import annotations

import select
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.simulator import HANGS, Log, Machine, Simulation, Spare

from phalanx.actors.api.calls import CallMethods
from phalanx.actors.group.handle import Group, Parent
from phalanx.actors.group.shutdown import Shutdown
from phalanx.actors.spec.options import spec_of
from phalanx.actors.spec.worker import WorkerActor
from phalanx.supervision import (
    SHUTDOWN,
    CallTimeout,
    ChildSpec,
    ChildType,
    ExitReason,
    Intensity,
    StartContext,
    SupervisorSpec,
    WorkerDied,
)
from phalanx.supervision.tree.actor import SupervisorActor
from phalanx.supervision.tree.services import TreeServices


class Shard(WorkerActor):
    def double(self, value: int) -> int:
        return 2 * value

    def die(self, rank: int) -> int:
        return rank

    def hang(self, rank: int) -> int:
        return rank

    def delay(self, rank: int) -> int:
        return rank


class Served:
    """What the fake processes do for a call."""

    @staticmethod
    def double(_worker: Any, value: int) -> int:
        return 2 * value

    @staticmethod
    def die(worker: Any, rank: int) -> int:
        if worker.label.startswith(f"root/model/{rank}#"):
            worker.send_signal(signal.SIGKILL)
        return rank

    @staticmethod
    def hang(worker: Any, rank: int) -> Any:
        return HANGS if worker.label.startswith(f"root/model/{rank}#") else rank

    @staticmethod
    def delay(worker: Any, rank: int) -> Any:
        """Have *rank* answer after 1.2 seconds."""
        if not worker.label.startswith(f"root/model/{rank}#"):
            return rank
        simulation = worker.machine.simulation
        simulation.call_at(simulation.now + 1.2, worker.answer_late)
        return HANGS


class Child:
    """An executor's group as a child, without a user's thread that waits for it."""

    def __init__(self, machine: Machine, **options: Any) -> None:
        self.machine = machine
        self.options = options
        self.groups: list[Group] = []

    def __call__(self, ctx: StartContext) -> Child:
        usual: dict[str, Any] = {"policy": {"backoff": {"initial": 0.5}}, "hang_after": 5.0}
        usual |= {"devices": "cpu", "intensity": (1, 60.0), "launch": {"preload": ()}}
        spec = spec_of(Shard, 2, name=ctx.path, **{**usual, **self.options})
        parent = Parent(ctx=ctx, on_end=ctx.exited, checkpoints=None)
        runtime: Any = self.machine
        group = Group(
            spec,
            runtime,
            parent=parent,
            **self.machine.seams(),
        )
        self.groups.append(group)
        group.start()
        return self

    def terminate(self, _reason: ExitReason) -> None:
        self.groups[-1].request_close()

    def kill(self) -> None:
        self.groups[-1].kill()

    def call(self, method: str, *args: Any) -> Any:
        """Make a call, and return its future once it is done."""
        future = CallMethods[Any](self.groups[-1]).collective_rpc(
            method, None, args, non_block=True
        )
        self.machine.simulation.run_until(future.done)
        return future


def run() -> list[tuple[float, str, str]]:
    """Run two ranks under a supervisor from their start to their close; return the events."""
    simulation = Simulation()
    machine = Machine(simulation, Served)
    child = Child(machine)
    ended: list[ExitReason] = []
    started: list[BaseException | None] = []
    services = TreeServices(
        clock=simulation.time,
        timers=simulation,
        jitter=lambda: 0.25,
        spawn=simulation.spawn,
        begin=simulation.begin,
        log=Log(),
    )
    services.subscribe(machine.emit)
    model = ChildSpec("model", child, type=ChildType.SUPERVISOR, killable=True)
    spec = SupervisorSpec("root", children=[model], intensity=Intensity(5, 60.0))

    def on_start(_top: SupervisorActor | None, error: BaseException | None) -> None:
        started.append(error)

    top = SupervisorActor(spec, "root", services, on_start=on_start, on_exit=ended.append)
    services.look = lambda: top.snapshot({})

    services.run(top)
    simulation.run_until(lambda: bool(child.groups) and child.groups[-1].ready.is_set())
    assert child.call("double", 21).result(0) == [42, 42]

    died = child.call("die", 1)  # the group restarts both of its ranks
    assert isinstance(died.exception(0), WorkerDied)
    assert child.call("double", 4).result(0) == [8, 8]

    assert isinstance(child.call("die", 0).exception(0), WorkerDied)  # and gives up
    simulation.run_until(lambda: len(child.groups) == 2 and child.groups[1].ready.is_set())
    assert child.call("double", 5).result(0) == [10, 10]

    hung = child.call("hang", 0)
    assert isinstance(hung.exception(0), WorkerDied), repr(hung.exception(0))
    assert "hang" in str(hung.exception(0))
    assert child.call("double", 6).result(0) == [12, 12]

    top.terminate(SHUTDOWN)
    simulation.run_until(lambda: bool(ended))
    assert started == [None]
    assert ended == [SHUTDOWN]
    assert all(group.gone.is_set() for group in child.groups)
    assert all(worker.status is not None for worker in machine.workers)
    return machine.events


def test_two_ranks_start_serve_die_hang_restart_and_close_in_one_thread_the_same_every_time() -> (
    None
):
    threads = threading.active_count()

    first = run()

    assert [run() for _ in range(3)] == [first] * 3
    assert threading.active_count() == threads
    assert [name for _, name, _ in first if name in ("GroupUp", "ChildExited")] == [
        "GroupUp", "GroupUp", "ChildExited", "GroupUp", "GroupUp", "ChildExited",
    ]  # fmt: skip


class Thrown(BaseException):
    """What is thrown into the thread that reads."""


def throw(*_: object) -> None:
    raise Thrown


def group_of_two(**options: Any) -> tuple[Simulation, Child]:
    """Return two ranks that serve, without a supervisor."""
    simulation = Simulation()
    child = Child(Machine(simulation, Served), **options)
    context: Any = SimpleNamespace(
        path="root/model",
        begun=threading.Event(),
        exited=lambda _: None,
        progressed=lambda: None,
        emit_by=lambda _: None,
        snapshot=lambda: None,
    )
    child(context)
    simulation.run_until(child.groups[0].ready.is_set)
    return simulation, child


def end(simulation: Simulation, child: Child) -> None:
    child.kill()
    simulation.run_until(child.groups[0].gone.is_set)


def test_an_answer_whose_reading_was_interrupted_is_not_lost_to_another_thread_that_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation, child = group_of_two()
    group = child.groups[0]
    plane: Any = group.plane
    calls = CallMethods[Any](group)
    watches, simulation.watches = simulation.watches, {}  # no thread reads
    futures = [calls.collective_rpc("double", None, (value,), non_block=True) for value in (1, 2)]
    channels = [simulation.sources[fd] for fd in plane._table.by_fd]
    simulation.run_until(lambda: all(len(each.to_driver) == 2 for each in channels))

    with monkeypatch.context() as patch:
        patch.setattr(plane, "_answer", throw)
        with pytest.raises(Thrown):
            plane._on_ready([(channels[0].fileno(), select.EPOLLIN)])
    plane.running()  # as the group's actor looks, before the event loop's thread does
    simulation.watches = watches
    simulation.run_until(lambda: all(future.done() for future in futures))

    assert [future.result(0) for future in futures] == [[2, 2], [4, 4]]
    end(simulation, child)


def test_a_worker_keeps_no_limit_that_has_passed() -> None:
    simulation, child = group_of_two()
    shutdown = Shutdown(child.groups[0], lambda *_: None)
    worker: Any = SimpleNamespace(timers=[], released=False)
    passed: list[int] = []
    for epoch in range(10):
        shutdown.after(worker, 1.0, passed.append, epoch)
    simulation.run_until(lambda: len(passed) == 10)

    shutdown.after(worker, 1.0, passed.append, 10)

    assert len(worker.timers) == 1
    end(simulation, child)


@pytest.mark.parametrize("step", ["_on_end", "_stop_reading", "_pump_after_read"])
def test_the_end_of_a_channel_whose_reading_was_interrupted_is_reported(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    simulation, child = group_of_two()
    plane: Any = child.groups[0].plane
    watches, simulation.watches = simulation.watches, {}  # no thread reads
    calls = CallMethods[Any](child.groups[0])
    future = calls.call("hang", None, (0,), rank=0, non_block=True)
    fd = next(iter(plane._table.by_fd))
    simulation.sources[fd].cut()  # its process lives

    with monkeypatch.context() as patch:
        patch.setattr(plane, step, throw)
        with pytest.raises(Thrown):
            plane._on_ready([(fd, select.EPOLLIN)])
    simulation.watches = watches
    simulation.run_until(future.done)

    assert "closed" in str(future.exception(0))  # and not that it hangs
    end(simulation, child)


def pass_time(simulation: Simulation, seconds: float) -> None:
    over: list[bool] = []
    simulation.call_at(simulation.now + seconds, lambda: over.append(True))
    simulation.run_until(lambda: bool(over))


def test_a_rank_that_answers_while_it_is_examined_for_being_overdue_is_spared() -> None:
    simulation, child = group_of_two()
    group = child.groups[0]
    future = CallMethods[Any](group).collective_rpc(
        "delay", 1.0, (0,), non_block=True, on_timeout="restart"
    )
    simulation.run_until(future.done)  # its heartbeat is awaited from now on, for half a second

    pass_time(simulation, 5.0)

    assert isinstance(future.exception(0), CallTimeout)
    assert [rank.incarnation for rank in group.view.ranks] == [1, 1]
    end(simulation, child)


def spare_of(simulation: Simulation, child: Child) -> Spare:
    simulation.run_until(lambda: bool(child.machine.spares))
    return child.machine.spares[0]


def test_a_spare_that_gets_warm_while_it_is_killed_for_its_late_start_is_killed() -> None:
    simulation, child = group_of_two(standby=1, limits={"start": 5.0})
    spare = spare_of(simulation, child)

    simulation.call_at(simulation.now + 6.0, spare.get_warm)  # its stacks are being written
    simulation.run_until(lambda: spare.status is not None)

    assert child.groups[0].view.standby == 0
    end(simulation, child)


def test_spares_that_die_again_and_again_once_they_are_warm_are_replaced_with_a_delay() -> None:
    simulation, child = group_of_two(standby=1)
    spares, group = child.machine.spares, child.groups[0]
    waits: list[float] = []
    died_at = simulation.now
    while len(waits) < 3:
        simulation.run_until(lambda: len(spares) > len(waits))
        waits.append(simulation.now - died_at)
        spares[-1].get_warm()
        simulation.run_until(lambda: group.view.standby == 1)
        spares[-1].send_signal(signal.SIGKILL)
        died_at = simulation.now

    assert waits[1] == 0.0 < waits[2]
    end(simulation, child)


def test_the_limit_of_the_start_of_a_spare_does_not_end_the_rank_that_it_takes() -> None:
    simulation, child = group_of_two(standby=1, limits={"start": 5.0}, policy={})
    spare, group = spare_of(simulation, child), child.groups[0]

    simulation.call_at(simulation.now + 5.2, spare.get_warm)  # a heartbeat of it is awaited
    simulation.run_until(lambda: group.view.standby == 1)
    child.machine.workers[1].send_signal(signal.SIGKILL)
    simulation.call_at(simulation.now + 2.0, spare.get_ready)
    simulation.run_until(lambda: group.view.epoch == 2 and str(group.view.phase) == "serving")

    assert (group.view.ranks[0].pid, spare.status) == (spare.pid, None)
    assert group.view.restarts == 1
    end(simulation, child)
