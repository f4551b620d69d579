"""Ranks on a real GPU: shared, killed, out of memory, broken; run by ``make test-gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.device import NCCL_ON_ONE_GPU, rank_environment
from tests.gpu.conftest import mask
from tests.gpu.workers import InGroup, InTwoGroups, OnGpu, Ready
from tests.support.processes import wait_until
from tests.support.rank_faults import kill

from phalanx.actors import Devices, Executor, Launch, RestartPolicy
from phalanx.runtime import DevicePool
from phalanx.supervision import ExitKind, RuntimeFault, Strategy, WorkerDied

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("phalanx_leak_check")]

Build = Callable[..., Executor[Any]]
LONG = 90.0
MIB = 1 << 20
GIB = 1 << 30
SLACK = 256 * MIB
ON_ONE_GPU: dict[str, Any] = {
    "devices": Devices(per_rank=0.5),
    "launch": Launch(env=NCCL_ON_ONE_GPU, rank_env=rank_environment(2), preload=("torch",)),
}


def used(pool: DevicePool, device: str) -> int:
    assert pool._inventory is not None
    found = pool._inventory.used_bytes(device)
    assert found is not None
    return found


def test_a_rank_sees_the_device_leased_to_it_and_the_driver_starts_no_cuda(
    build: Build, pool: DevicePool
) -> None:
    ex = build(OnGpu)
    assert pool._inventory is not None

    count, uuid, given = ex.call("sees", LONG, rank=0)

    assert count == 1
    assert given == ex.ranks[0].device == pool.status()[0].device
    assert given.startswith("MIG-") or given == f"GPU-{uuid}"
    using = pool._inventory.processes(given)  # descriptors prove nothing: NVML opens them too
    assert using is None or (os.getpid() not in using and len(using) == 1)


def test_the_devices_of_this_machine_are_well(pool: DevicePool) -> None:
    assert pool.look() == {}
    assert [one.reason for one in pool.status()] == [""] * len(pool.status())


def test_ranks_share_a_gpu_and_one_that_is_killed_gives_its_part_back(build: Build) -> None:
    ex = build(OnGpu, 4, devices=Devices(per_rank=0.25))
    assert len({given for _, _, given in ex.collective_rpc("sees", LONG)}) == 1
    ex.collective_rpc("hold", LONG, args=(GIB,))
    before = ex.call("free", LONG, rank=0)

    kill(ex, 1)

    incarnation, free = ex.call("started_with", LONG, rank=1)
    assert incarnation == 2
    assert free > before + GIB - SLACK
    assert ex.collective_rpc("incarnation", LONG) == [1, 2, 1, 1]


@pytest.mark.parametrize("method", ["hold", "start_program"])
def test_the_memory_of_a_killed_rank_is_back_before_its_successor_starts(
    build: Build, pool: DevicePool, method: str
) -> None:
    ex = build(OnGpu)
    device = ex.ranks[0].device
    _, fresh = ex.call("started_with", LONG, rank=0)
    size = min(16 * GIB, fresh // 2)
    ex.call(method, LONG, args=(size,), rank=0)
    assert used(pool, device) > size

    kill(ex)

    incarnation, free = ex.call("started_with", LONG, rank=0)
    assert incarnation == 2
    assert free > fresh - SLACK
    assert ex.ranks[0].device == device
    assert used(pool, device) < size


def test_nothing_is_left_on_the_device_after_close(build: Build, pool: DevicePool) -> None:
    device = pool.status()[0].device
    before = used(pool, device)
    ex = build(OnGpu, 2, devices=Devices(per_rank=0.5))
    ex.collective_rpc("hold", LONG, args=(GIB,))

    kill(ex, 0)
    ex.close()

    assert used(pool, device) < before + SLACK
    assert pool.status()[0].state == "free"


def test_an_answer_from_the_gpu_arrives_on_the_drivers_host(build: Build) -> None:
    torch: Any = pytest.importorskip("torch")
    ex = build(OnGpu, 2, devices=Devices(per_rank=0.5))

    for size in (3, 1 << 24):  # in the message, and beside it
        value = torch.arange(size, dtype=torch.float32)
        for answer in ex.collective_rpc("double", LONG, args=(value,)):
            assert answer.device.type == "cpu"
            assert torch.equal(answer, value * 2)
    module = ex.call("linear", LONG, rank=0)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert module(torch.ones(3)).shape == (2,)
    assert ex.call("where", LONG, args=(value,), rank=0) == "cpu"  # from the host it stays there
    assert not torch.cuda.is_initialized()


def test_a_stream_of_gpu_tensors_arrives_on_the_drivers_host(build: Build) -> None:
    ex = build(OnGpu)

    items = list(ex.stream("chunks", args=(5,), rank=0))

    assert [float(item[0]) for item in items] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert {item.device.type for item in items} == {"cpu"}


def test_an_argument_from_the_drivers_gpu_lands_on_the_ranks_own() -> None:
    # A driver that uses CUDA itself; it has the device before the rank gets it.
    code = """
        import torch
        from phalanx import Executor, Runtime
        from tests.gpu.workers import OnGpu
        value = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
        with Runtime(console=None, stream=False) as runtime:
            halves = dict(names="cuda", per_rank=0.5)
            with Executor(OnGpu, 2, devices=halves, runtime=runtime) as ex:
                print(*ex.collective_rpc("where", 90, args=(value,)))
                answer = ex.call("double", 90, args=(value,), rank=1)
                print(answer.device, torch.equal(answer, value.cpu() * 2))
    """
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | mask()
    root = Path(__file__).parents[2]
    env["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        check=False,
        text=True,
        timeout=110,
        env=env,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cuda:0 cuda:0", "cpu True"]


def test_an_assertion_on_the_device_restarts_the_rank_and_is_in_its_report(build: Build) -> None:
    ex = build(OnGpu, 2, devices=Devices(per_rank=0.5))
    other = ex.call("pid", LONG, rank=1)

    with pytest.raises(RuntimeError, match="device-side assert"):
        ex.call("assert_on_device", LONG, rank=0)

    assert ex.call("incarnation", LONG, rank=0) == 2
    ex.call("hold", LONG, args=(MIB,), rank=0)  # its CUDA is sound again
    report = ex.status().reports[-1]
    assert (report.rank, report.reason.kind) == (0, ExitKind.CRASH)
    assert "device-side assert" in str(report.reason)
    assert "assert_on_device" in report.last_words + report.stderr
    assert ex.call("pid", LONG, rank=1) == other
    assert ex.status().devices[0].state == "leased"  # the device is as good as before


def test_out_of_memory_leaves_the_rank_in_service(build: Build) -> None:
    ex = build(OnGpu)
    before = ex.call("pid", LONG, rank=0)

    with pytest.raises(RuntimeError, match="out of memory") as raised:
        ex.call("exhaust", LONG, rank=0)

    assert type(raised.value).__name__ == "OutOfMemoryError"
    assert ex.call("pid", LONG, rank=0) == before
    ex.call("hold", LONG, args=(MIB,), rank=0)
    assert ex.status().restarts == 0


def test_a_rank_that_hangs_in_a_kernel_is_ended_and_replaced(build: Build) -> None:
    ex = build(OnGpu, hang_after=3.0)

    with pytest.raises(WorkerDied, match="hang_after=3 s"):
        ex.call("spin", LONG, args=(40_000_000_000,), rank=0)  # some 20 seconds

    assert ex.call("incarnation", LONG, rank=0) == 2
    assert "spin" in ex.status().reports[-1].stacks


def test_a_spare_sees_no_device_and_gets_one_with_its_rank(build: Build) -> None:
    ex = build(Ready, standby=1)
    shared = ex._group
    with shared.changed:
        assert shared.changed.wait_for(lambda: shared.view.standby == 1, LONG)

    kill(ex)

    assert ex.call("sums", LONG, rank=0) == (28, 0)
    assert ex.call("sees", LONG, rank=0)[0] == 1
    assert ex.call("incarnation", LONG, rank=0) == 2


def test_a_group_of_one_meets_by_nccl_and_meets_again_after_a_death(build: Build) -> None:
    ex = build(InGroup, strategy=Strategy.ONE_FOR_ALL)
    assert ex.call("total", LONG, rank=0) == 1.0

    kill(ex)

    assert ex.call("total", LONG, rank=0) == 1.0
    assert ex.status().epoch == 2


def test_two_ranks_meet_by_nccl_and_are_both_restarted_after_a_death(build: Build) -> None:
    ex = build(InGroup, 2, strategy=Strategy.ONE_FOR_ALL, **ON_ONE_GPU)
    assert ex.collective_rpc("total", LONG) == [2.0, 2.0]

    kill(ex, 1)

    assert ex.collective_rpc("total", LONG, retries=1) == [2.0, 2.0]
    assert ex.collective_rpc("incarnation", LONG) == [2, 2]


@pytest.mark.parametrize("part", [False, True])
def test_a_survivor_that_waits_in_one_of_its_nccl_groups_is_kept(
    build: Build, tmp_path: Path, *, part: bool
) -> None:
    keep = RestartPolicy(survivors="keep")
    ex = build(InTwoGroups, 2, strategy=Strategy.ONE_FOR_ALL, policy=keep, **ON_ONE_GPU)
    before = ex.call("pid", LONG, rank=0)
    mark = tmp_path / "waits"
    words = {"part": part, "mark": str(mark)}
    waiting = ex.call("wait_in_group", LONG, kwargs=words, rank=0, non_block=True)
    wait_until(mark.exists)

    kill(ex, 1)

    with pytest.raises(RuntimeFault, match="aborted during the call"):
        waiting.result(LONG)
    assert ex.collective_rpc("total", LONG, retries=1) == [4.0, 4.0]
    assert ex.call("pid", LONG, rank=0) == before
    assert ex.collective_rpc("incarnation", LONG) == [1, 2]


@pytest.mark.gpus(2)
def test_every_rank_may_see_all_devices_under_the_same_names(build: Build) -> None:
    ex = build(OnGpu, 2, devices=Devices(visibility="all"))

    seen = ex.collective_rpc("sees", LONG)

    assert seen[0] == seen[1]
    assert seen[0][0] >= 2
    assert [ex.call(lambda w: w.ctx.device, LONG, rank=rank) for rank in range(2)] == [
        "cuda:0",
        "cuda:1",
    ]
