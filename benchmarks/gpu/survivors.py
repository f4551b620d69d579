"""E5: survivors of an NCCL group, with two ranks on one GPU.

From SIGKILL of a rank to the first right all-reduce of the next epoch; whether the survivor is the
same process with the same weights; how long an abort takes; calls that were never answered. Ranks
on one GPU take turns, so that the all-reduces themselves are slow: only times of recovery count.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx import Executor, Intensity, Launch, Limits, RestartPolicy, Runtime, WorkerActor
from phalanx.actors import Devices
from phalanx.errors import CallTimeout, ExecutorClosed, WorkerDied
from phalanx.runtime import abort_process_groups

from .device import NCCL_ON_ONE_GPU, allocate, rank_environment, synchronize

if TYPE_CHECKING:
    from phalanx import WorkerContext

    from .record import Record

_RANKS = 2
_GROUPS = 4  # at the same time, in the second half
_LONG = 60.0  # seconds after which a call counts as hung


class Meeting(WorkerActor):
    """A rank with weights, in a group and in one split from it."""

    def __init__(self, backend: str, size: int) -> None:
        self._backend = backend
        self._size = size

    def on_start(self, ctx: WorkerContext) -> None:
        """Make the weights and meet the others."""
        # Different in each process: this distinguishes kept weights from new ones.
        self.weights = allocate(ctx.device, self._size)
        self.weights.fill_(os.getpid() % 251)
        self.on_reform(ctx)

    def on_reform(self, ctx: WorkerContext) -> None:
        """Meet the others, and note when each step was done."""
        dist: Any = import_module("torch.distributed")
        times = [time.monotonic()]
        ctx.init_process_group(self._backend, timeout=60)
        times.append(time.monotonic())
        self.part: Any = dist.new_group(list(range(ctx.world_size)))
        times.append(time.monotonic())
        self._sum(None)
        times.append(time.monotonic())
        self._sum(self.part)
        times.append(time.monotonic())
        self.joined = [round(each, 3) for each in times]

    def total(self) -> float:
        """Add up a one of each rank, in both groups."""
        return self._sum(None) + self._sum(self.part)

    def _sum(self, group: Any, size: int = 1) -> float:
        torch: Any = import_module("torch")
        value = torch.ones(size, device=self.ctx.device)
        import_module("torch.distributed").all_reduce(value, group=group)
        return float(value[0])

    def reduce(self, seconds: float, *, split: bool) -> None:
        """All-reduce 16 MiB again and again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._sum(self.part if split else None, 1 << 22)

    def wait_for_rank(self, absent: int, seconds: float) -> None:
        """All-reduce in the split group, where rank *absent* does not come."""
        if self.ctx.rank == absent:
            time.sleep(seconds)
        else:
            self._sum(self.part)

    def state(self) -> tuple[int, str, list[float]]:
        """Return the process, the checksum of its weights, when it had made each step to meet."""
        digest = hashlib.sha256(self.weights.cpu().numpy().tobytes()).hexdigest()
        return os.getpid(), digest, self.joined

    def abort_alone(self) -> float:
        """Launch an all-reduce that the others do not join, abort; return its seconds."""
        torch: Any = import_module("torch")
        value = torch.ones(1, device=self.ctx.device)
        import_module("torch.distributed").all_reduce(value, async_op=True)
        began = time.monotonic()
        abort_process_groups()
        synchronize(self.ctx.device)
        return time.monotonic() - began

    def wait(self) -> None:
        """Do nothing."""


def run(record: Record) -> None:
    """Kill ranks of one group, half of the time in each situation; then of several at once."""
    half = record.left() / 2
    with Runtime(console=None, stream=False) as runtime:
        with _group(record, runtime) as ex:
            record.set(environment=NCCL_ON_ONE_GPU, right=ex.collective_rpc("total", _LONG))
            chance = random.Random(5)
            for number in range(record.choose(200, 2)):
                if record.left() < half:
                    break
                _round(record, ex, chance, number)
        for _ in range(record.choose(3, 1)):
            with _group(record, runtime) as ex, suppress(WorkerDied):
                record.add("aborts", seconds=ex.call("abort_alone", _LONG, rank=0))
        with ThreadPoolExecutor(_GROUPS) as threads:
            list(threads.map(partial(_many, record, runtime), range(_GROUPS)))
    rows = record.rows("kills")
    record.summarize("kills", "seconds", "how")
    record.summarize("aborts", "seconds")
    record.set(
        hung=sum(row["hung"] for row in rows),
        kept=sum(row["kept"] for row in rows),
        wrong_weights=sum(not row["weights"] for row in rows),
        kills_done=len(rows),
    )


def _many(record: Record, runtime: Runtime, number: int) -> None:
    """Kill ranks of one of several groups in mid-collective."""
    chance = random.Random(number)
    with _group(record, runtime) as ex:
        for _ in range(record.choose(200, 1)):
            if not record.has_time(60.0):
                return
            _once(record, ex, f"{_GROUPS} groups", ("reduce", 60.0), chance=chance, split=False)


def _round(record: Record, ex: Executor[Any], chance: random.Random, number: int) -> None:
    """Kill a rank in mid-collective; in the first rounds in each other situation as well."""
    few = record.choose(3, 1)
    if number < few:
        _once(record, ex, "split child", ("wait_for_rank", 1, 60.0), chance=chance, victim=1)
        _once(record, ex, "idle", ("wait",), chance=chance)
        _twice(record, ex, chance)
    if number < min(few, 2):
        _stop(record, ex)
    split = chance.random() < 0.3
    how = "in a split group" if split else "in mid-collective"
    _once(record, ex, how, ("reduce", 60.0), chance=chance, split=split)


def _group(record: Record, runtime: Runtime) -> Executor[Any]:
    share = 1 / (_RANKS * _GROUPS)
    devices: Any = "cpu" if record.rehearsal else Devices(names="cuda", per_rank=share)
    backend = record.choose("nccl", "gloo")
    policy = RestartPolicy(survivors="keep", intensity=Intensity(10_000, 60.0))
    return Executor(
        Meeting,
        _RANKS,
        args=(backend, record.choose(64 << 20, 1 << 16)),
        devices=devices,
        policy=policy,
        limits=Limits(start=_LONG, stopped=2.0),
        launch=Launch(
            env=NCCL_ON_ONE_GPU,
            rank_env=rank_environment(_RANKS),
            preload=("torch", "benchmarks.gpu.survivors"),
        ),
        runtime=runtime,
    )


def _once(
    record: Record,
    ex: Executor[Any],
    how: str,
    call: tuple[Any, ...],
    *,
    chance: random.Random,
    victim: int | None = None,
    **kwargs: Any,
) -> None:
    """Kill a rank during *call* (method, arguments); keep what came of it."""
    victim = chance.randrange(_RANKS) if victim is None else victim
    before = ex.collective_rpc("state", _LONG, retries=9)
    busy = ex.collective_rpc(call[0], args=call[1:], kwargs=kwargs, non_block=True)
    time.sleep(chance.uniform(0.05, 0.25))  # somewhere in the middle
    at = _kill(ex, victim, signal.SIGKILL)
    row = _recover(ex, at)
    hung = row["hung"]
    try:
        busy.result(_LONG)
    except CallTimeout:
        hung += 1
    except (WorkerDied, ExecutorClosed):
        pass
    _keep(record, ex, how, before, at, victim=victim, row={**row, "hung": hung})


def _twice(record: Record, ex: Executor[Any], chance: random.Random) -> None:
    """Kill a rank, and its successor while the next group is being formed."""
    before = ex.collective_rpc("state", _LONG, retries=9)
    _kill(ex, 1, signal.SIGKILL)
    first = ex.ranks[1].incarnation
    until = time.monotonic() + 10.0
    while (ex.ranks[1].incarnation == first or ex.ranks[1].pid is None) and (
        time.monotonic() < until
    ):
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, record.choose(0.8, 0.3)))  # the groups form within a second
    at = _kill(ex, 1, signal.SIGKILL)
    _keep(record, ex, "during init", before, at, victim=1, row=_recover(ex, at))


def _stop(record: Record, ex: Executor[Any]) -> None:
    """SIGSTOP a rank in mid-collective: `Limits.stopped` is two seconds."""
    before = ex.collective_rpc("state", _LONG, retries=9)
    busy = ex.collective_rpc("reduce", args=(60.0,), kwargs={"split": False}, non_block=True)
    time.sleep(0.2)
    at = _kill(ex, 1, signal.SIGSTOP)
    with suppress(WorkerDied, CallTimeout, ExecutorClosed):
        busy.result(_LONG)
    _keep(record, ex, "SIGSTOP, 2 s of it the limit", before, at, victim=1, row=_recover(ex, at))


def _kill(ex: Executor[Any], rank: int, number: int) -> float:
    pid = ex.ranks[rank].pid
    at = time.monotonic()
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return at


def _recover(ex: Executor[Any], at: float) -> dict[str, Any]:
    """Return the seconds from *at* to the first right all-reduce."""
    try:
        sums = ex.collective_rpc("total", _LONG, retries=9)
    except CallTimeout:
        return {"seconds": None, "right": False, "hung": 1}
    right = sums == [2.0 * _RANKS] * _RANKS
    return {"seconds": time.monotonic() - at, "right": right, "hung": 0}


def _keep(
    record: Record,
    ex: Executor[Any],
    how: str,
    before: Any,
    at: float,
    *,
    victim: int,
    row: dict[str, Any],
) -> None:
    after = ex.collective_rpc("state", _LONG, retries=9)
    other = 1 - victim
    kept = before[other][0] == after[other][0]
    weights = not kept or before[other][1] == after[other][1]
    # Of each rank: begun, group, second group, sum of the first, sum of the second.
    joined = [[round(each - at, 3) for each in times] for _, _, times in after]
    status = ex.status()
    row |= {"how": how, "kept": kept, "weights": weights, "joined": joined, "epoch": status.epoch}
    record.add("kills", **row)
    if not kept and how != "during init":
        found = status.reports[-1]
        record.add("replaced", how=how, rank=found.rank, reason=str(found.reason))
