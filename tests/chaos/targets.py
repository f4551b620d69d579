"""What the tests of chaos runs are pointed at, and what is to strike it."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from tests.support.transport import TRANSPORT
from tests.support.workers import Echo, Reducer

from phalanx.actors import Executor, Launch, Limits, RestartPolicy, WorkerContext, executor_child
from phalanx.chaos import Schedule, ScheduledFault
from phalanx.chaos.nemesis.catalog import FaultPattern
from phalanx.runtime import Runtime
from phalanx.supervision import ExecutorClosed, Intensity, Strategy, Supervisor, SupervisorSpec


def in_turn(*patterns: str, first: float = 0.2, gap: float = 0.4, seconds: float = 0.0) -> Schedule:
    """Return a schedule of faults written ``fault:target@point``, *gap* seconds apart."""
    return Schedule(
        tuple(
            ScheduledFault(
                number=number + 1,
                at=first + gap * number,
                fault=each.fault,
                target=each.target or "random",
                point=each.point or "",
                seconds=seconds,
                draw=(number * 0.37) % 1,
            )
            for number, each in enumerate(map(FaultPattern.of, patterns))
        )
    )


LAUNCH = Launch(preload=(), transport=TRANSPORT)


def build(world_size: int = 2, **options: Any) -> Executor[Any]:
    return Executor(Echo, world_size, launch=LAUNCH, limits=Limits(start=30.0), **options)


def one_for_one() -> Executor[Any]:
    return build(2, strategy=Strategy.ONE_FOR_ONE)


def with_a_spare() -> Executor[Any]:
    return build(2, standby=1)


class Quiet:
    """A target on a runtime that says nothing and outlives the run."""

    def __init__(self, runtime: Runtime, world_size: int = 2, **options: Any) -> None:
        self.options = {"runtime": runtime, **options}
        self.world_size = world_size

    def __call__(self) -> Executor[Any]:
        return build(self.world_size, **self.options)


def reducing(executor: Executor[Any], chance: random.Random) -> None:
    """Add up over the process group, and check the sum."""
    value = float(chance.randrange(100))
    total = executor.collective_rpc("total", 30.0, (value,), retries=9)
    if total != [3 * value] * 2:
        raise AssertionError(total)


def calling_in_rows(executor: Executor[Any], _chance: random.Random) -> None:
    """Make calls without any limit, of which most wait behind others."""
    for future in [executor.collective_rpc("again", args=(1.0,), non_block=True) for _ in range(9)]:
        future.result()


class Rejoining(Reducer):
    """The same, also as a survivor that is kept."""

    def on_reform(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)


class Reducing:
    """A target whose ranks meet in a process group."""

    def __init__(self, runtime: Runtime, survivors: Any = "restart") -> None:
        self.runtime = runtime
        self.survivors = survivors

    def __call__(self) -> tuple[Executor[Any], Any]:
        options: dict[str, Any] = {
            "limits": Limits(start=60.0),
            "runtime": self.runtime,
            "launch": Launch(transport=TRANSPORT),
            "policy": RestartPolicy(survivors=self.survivors, leave_within=5.0),
        }
        built: Executor[Any] = Executor(Rejoining, 2, **options)
        return built, reducing


def tree() -> tuple[Supervisor, Any]:
    """Two groups under a supervisor, which builds one anew that has given up."""
    children = tuple(executor_child(name, Echo, 1, launch=LAUNCH) for name in ("a", "b"))
    spec = SupervisorSpec(id="root", intensity=Intensity(100, 60.0), children=children)
    return Supervisor(spec), echoing


def brittle() -> tuple[Supervisor, Any]:
    """A tree that is at its end with the first death in it."""
    child = executor_child("a", Echo, 1, intensity=Intensity(0, 60.0), launch=LAUNCH)
    spec = SupervisorSpec(id="root", intensity=Intensity(0, 60.0), children=(child,))
    return Supervisor(spec), calling_a


def calling_a(root: Supervisor, _chance: random.Random) -> None:
    root.child("a").collective_rpc("again", 10.0, (1.0,))


def echoing(root: Supervisor, chance: random.Random) -> None:
    value = chance.random()
    answer = root.child(chance.choice("ab")).collective_rpc("again", 10.0, (value,), retries=9)
    if answer != [value]:
        raise AssertionError(answer)


def ends_at_a_restart() -> tuple[Executor[Any], Any]:
    """A target whose driver ends by itself once a rank has been restarted."""

    def watching(executor: Executor[Any], _chance: random.Random) -> None:
        time.sleep(0.01)
        if executor.status().restarts:
            os._exit(3)

    return one_for_one(), watching


VALUE = 3


def inline() -> Executor[Any]:
    return Executor(Echo, 1, launch="inline")


def leaves() -> None:
    raise SystemExit(3)


def raises() -> None:
    raise KeyError("of the user's own")


def calls_wrongly() -> None:
    raise ExecutorClosed("used after its end")


def wants_more(argument: int) -> None: ...


def returns_nonsense() -> int:
    return 7


def tensor_parallel() -> tuple[Executor[Any], Any]:
    """The ranks of the tensor-parallel example, and traffic that compares every embedding."""
    from minilm import MiniLM, batches, passages  # needs the weights
    from tensor_parallel import Shard

    whole = MiniLM()
    work = [(ids, whole(ids)) for _, ids in batches(passages(48), 8)]

    def embed(executor: Executor[Any], chance: random.Random) -> None:
        ids, expected = chance.choice(work)
        found = executor.collective_rpc("embed", 60.0, (ids,), unique_reply_rank=0, retries=20)
        difference = float((found - expected).abs().max())
        if difference > 1e-4:
            msg = f"an embedding differs by {difference:g} from that of one process"
            raise AssertionError(msg)

    launch = Launch(preload=("torch",))
    return Executor(Shard, 4, launch=launch), embed
