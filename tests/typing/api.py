"""How users write against the types. Checked by mypy and pyright, never run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import assert_type

from phalanx import (
    CallFuture,
    ChildSpec,
    CrashReport,
    Executor,
    Intensity,
    Outcome,
    Restart,
    Strategy,
    Supervisor,
    SupervisorSpec,
    WorkerActor,
    WorkerContext,
    executor_child,
    method,
)
from phalanx.errors import WorkerDied


class Shard(WorkerActor):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def on_start(self, ctx: WorkerContext) -> None:
        assert_type(ctx.rank, int)
        assert_type(ctx.device, str)

    @method
    def forward(self, value: float) -> float:
        return value * self.scale

    def halve(self, value: float) -> float:
        assert_type(self.forward(value), float)
        return value / 2

    @method(idempotent=True)
    def lookup(self, key: str) -> list[int]:
        return [len(key)]


executor = Executor(Shard, 2, strategy=Strategy.ONE_FOR_ALL, intensity=Intensity(3, 60.0))
assert_type(executor, Executor[Shard])
assert_type(executor.proxy().forward(1.0), float)
assert_type(executor.proxy(rank=0).lookup("a"), list[int])
assert_type(executor.proxy(any=True, timeout=5.0).halve(1.0), float)  # declared in no way
assert_type(executor.proxy().forward.future(1.0), Future[float])
assert_type(executor.proxy().forward.future(1.0).result(), float)
assert_type(executor.gather("forward", args=(1.0,)), list[Outcome])
assert_type(executor.gather("forward", args=(1.0,), non_block=True), CallFuture)
assert_type(executor.submit("lookup", args=("a",)), CallFuture)
assert_type(executor.status().reports, tuple[CrashReport, ...])
assert_type(executor.subscribe(print), Callable[[], None])

try:
    executor.collective_rpc("forward", args=(1.0,))
except WorkerDied as died:
    print(died.report)

spec = executor_child("replica", Shard, 2, restart=Restart.TRANSIENT)
assert_type(spec, ChildSpec)
tree = Supervisor(SupervisorSpec("root", Strategy.ONE_FOR_ONE, Intensity(3, 60.0), [spec]))
assert_type(tree.render(), str)


async def main() -> None:
    assert_type(await executor.aio.gather("forward", args=(1.0,)), list[Outcome])
    assert_type(await executor.proxy(rank=1).lookup.aio("a"), list[int])
