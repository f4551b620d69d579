"""Ranks whose devices fail, stay full or run out. The devices are fake; the deaths are not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.support.device_pools import lease_of
from tests.support.event_recorder import EventRecorder
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, kill, telling, wait_for_view
from tests.support.workers import Echo

from phalanx.actors import Devices, Executor, Launch, Limits
from phalanx.runtime import (
    DeviceAwaited,
    DevicePool,
    DeviceQuarantined,
    DeviceRestored,
    WorkerCrashed,
)
from phalanx.runtime.linux import procfs
from phalanx.supervision import (
    ExecutorClosed,
    NoDevice,
    SpecError,
    StartFailed,
    Strategy,
    WorkerDied,
)
from phalanx.testing import FakeGpus

LONG = 30.0
GIB = 1 << 30
MASK = "CUDA_VISIBLE_DEVICES"
USUAL = {"world_size": 1, "strategy": Strategy.ONE_FOR_ONE, "intensity": OFTEN}


def seen(ex: Executor[Any], rank: int = 0) -> str:
    """The devices that a rank sees, asked once it is up again."""
    found: str = ex.call("env", LONG, args=(MASK,), rank=rank)[MASK]
    return found


def test_a_rank_that_died_gets_its_device_again(make: Make) -> None:
    gpus = FakeGpus(3)
    pool = DevicePool.of("auto", 2, gpus, {})
    ex = make(world_size=2, devices=pool)
    before = seen(ex, 1)

    kill(ex, 1)

    assert seen(ex, 1) == before == gpus.uuid(1)
    assert ex.status().reports[-1].device == gpus.uuid(1)
    assert ex.ranks[1].device == gpus.uuid(1)


class HeldByProcess(FakeGpus):
    """Its memory is in use for as long as a process lives."""

    pid = 0

    def used_bytes(self, uuid: str) -> int | None:
        task = procfs.read(self.pid)
        return 40 * GIB if task is not None and task.state != "Z" else 0


def test_a_grandchild_that_keeps_the_device_open_goes_with_its_rank(make: Make) -> None:
    gpus = HeldByProcess(1)
    ex = make(devices=DevicePool.of("auto", 1, gpus, {}))
    recorded = EventRecorder(ex)
    gpus.pid = ex.call("grandchild", LONG, kwargs={"daemon": True}, rank=0)
    assert gpus.used_bytes(gpus.uuid(0))

    kill(ex)

    assert seen(ex) == gpus.uuid(0)
    assert not gpus.used_bytes(gpus.uuid(0))
    assert not recorded.every(DeviceQuarantined)


def test_a_rank_whose_device_stays_full_moves_to_another(make: Make) -> None:
    gpus = FakeGpus(2)
    ex = make(devices=DevicePool.of("auto", 1, gpus, {}, release_timeout=0.05))
    recorded = EventRecorder(ex)
    gpus.use(gpus.uuid(0), 40 * GIB)

    kill(ex)

    assert seen(ex) == gpus.uuid(1)
    told = recorded.wait(kind=DeviceQuarantined)[0]
    assert (told.device, told.cause) == (gpus.uuid(0), "memory")
    first = ex.status().devices[0]
    assert (first.state, first.reason) == ("quarantined", told.reason)
    assert ex.status().devices[1].holders == (f"{ex.name}/0",)


@pytest.mark.parametrize("why", ["recovered", "user"])
def test_a_group_without_a_device_waits_for_one_or_the_users_word_and_goes_on(
    make: Make, why: str
) -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    ex = make(devices=Devices(names=pool, timeout=None))
    recorded = EventRecorder(ex)
    gpus.use(gpus.uuid(0), 40 * GIB)
    kill(ex)
    waited = recorded.wait(kind=DeviceAwaited)[0]

    if why == "user":
        pool.restore(0)
    else:
        gpus.use(gpus.uuid(0), 0)

    assert seen(ex) == gpus.uuid(0)
    assert recorded.wait(kind=DeviceRestored)[0].why == why
    assert "not released in time" in waited.reason
    assert waited.timeout is None


def test_a_group_that_waits_in_vain_ends_and_says_why(make: Make) -> None:
    gpus = FakeGpus(1)
    ex = make(
        devices=Devices(names=DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0), timeout=0.0)
    )
    failed: list[Any] = []
    ended = threading.Event()
    ex.register_failure_callback(telling(failed, ended))
    gpus.use(gpus.uuid(0), 40 * GIB)

    kill(ex)

    assert ended.wait(LONG)
    with pytest.raises(ExecutorClosed, match="gave up: no room for") as refused:
        ex.call("echo", LONG, rank=0)
    assert isinstance(refused.value.__cause__, NoDevice)
    assert "not released in time" in refused.value.__cause__.quarantined["0: Fake 0"]
    assert len(failed) == 1
    assert ex.status().restarts == 1


def test_a_release_that_never_comes_to_its_end_is_waited_for_no_longer_than_a_start(
    make: Make,
) -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=1e6)
    ex = make(devices=Devices(names=pool, timeout=0.5), limits=Limits(start=2.0))
    gpus.use(gpus.uuid(0), 40 * GIB)

    kill(ex)

    with pytest.raises(WorkerDied, match="is being released; it has waited for limits.start=2 s"):
        ex.call("echo", LONG, rank=0)
    gpus.use(gpus.uuid(0), 0)  # else closing waits as long as the pool does


def test_a_wait_that_follows_a_release_is_told_of_and_has_all_of_its_time(make: Make) -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.5)
    ex = make(devices=Devices(names=pool, timeout=0.4))
    recorded = EventRecorder(ex)
    gpus.use(gpus.uuid(0), 40 * GIB)

    kill(ex)
    call = ex.call("echo", non_block=True, rank=0)

    assert "not released in time" in recorded.wait(kind=DeviceAwaited)[0].reason
    with pytest.raises(WorkerDied, match="it has waited for devices.timeout=0.4 s") as caught:
        call.result(LONG)
    assert isinstance(caught.value.__cause__, NoDevice)


def test_a_group_that_waits_for_a_device_can_be_closed(make: Make) -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    ex = make(world_size=2, devices=Devices(names=pool, timeout=None))
    recorded = EventRecorder(ex)
    gpus.use(gpus.uuid(0), 40 * GIB)
    kill(ex)
    recorded.wait(kind=DeviceAwaited)

    ex.close()

    assert ex.status().state == "ended"
    assert not ex.is_failed
    assert pool.status()[1].state == "free"


def test_a_death_while_another_rank_waits_for_a_device_is_mended_alone(make: Make) -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {}, release_timeout=0.0)
    ex = make(world_size=2, devices=Devices(names=pool, timeout=None))
    recorded = EventRecorder(ex)
    gpus.use(gpus.uuid(0), 40 * GIB)
    kill(ex, 0)
    recorded.wait(kind=DeviceAwaited)

    kill(ex, 1)

    assert seen(ex, 1) == gpus.uuid(1)
    pool.restore(0)
    assert seen(ex, 0) == gpus.uuid(0)


def test_a_death_of_a_group_that_waits_for_a_device_restarts_it_whole(make: Make) -> None:
    gpus = FakeGpus(3)
    pool = DevicePool.of("auto", 2, gpus, {}, release_timeout=0.0)
    other = lease_of(pool, 2, holder="another group")
    ex = make(
        world_size=2, devices=Devices(names=pool, timeout=None), strategy=Strategy.ONE_FOR_ALL
    )
    recorded = EventRecorder(ex)
    gpus.use(gpus.uuid(0), 40 * GIB)
    kill(ex, 1)
    waited = recorded.wait(kind=DeviceAwaited)[0]

    pool.give_back(other)

    assert ex.collective_rpc("rank", LONG) == [0, 1]
    assert {seen(ex, rank) for rank in range(2)} == {gpus.uuid(1), gpus.uuid(2)}
    assert waited.ranks == (0, 1)
    assert "is leased to another group" in waited.reason


def test_a_device_that_one_group_finds_lost_moves_the_ranks_of_every_group_and_says_why(
    make: Make,
) -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 1, gpus, {})
    groups = [make(devices=Devices(names=pool, per_rank=0.5)) for _ in range(2)]
    assert {seen(ex) for ex in groups} == {gpus.uuid(0)}
    recorded = [EventRecorder(ex) for ex in groups]

    gpus.lose(gpus.uuid(0))
    groups[0]._group.post(groups[0]._group.actor.look_at_devices)
    for each in recorded:
        each.wait(kind=WorkerCrashed)  # until then it may answer on the device that is lost

    assert {seen(ex) for ex in groups} == {gpus.uuid(1)}
    for ex in groups:
        reason = str(ex.status().reports[-1].reason)
        assert reason.startswith(f"crash (device {gpus.uuid(0)}: NVML has lost it")
    told = recorded[0].wait(kind=DeviceQuarantined)[0]
    assert told.holders == tuple(f"{ex.name}/0" for ex in groups)


def test_a_fault_that_is_not_fatal_lets_the_rank_go_on_and_moves_the_next_one(make: Make) -> None:
    gpus = FakeGpus(2)
    ex = make(devices=DevicePool.of("auto", 1, gpus, {}))
    recorded = EventRecorder(ex)

    gpus.report_xid(gpus.uuid(0), 94)
    ex._group.post(ex._group.actor.look_at_devices)
    recorded.wait(kind=DeviceQuarantined)

    assert (seen(ex), ex.status().restarts) == (gpus.uuid(0), 0)
    kill(ex)
    assert seen(ex) == gpus.uuid(1)


def test_a_pool_without_a_free_device_fails_the_start_at_once_and_leaves_nothing(
    make: Make, runtime: Any
) -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    first = make(world_size=2, devices=pool, name="first")

    with pytest.raises(StartFailed, match="0: Fake 0 is leased to first/0") as caught:
        Executor(Echo, 1, launch=Launch(preload=()), runtime=runtime, devices=pool, name="second")
    assert isinstance(caught.value.__cause__, NoDevice)
    with pytest.raises(SpecError, match="world_size=3"):
        make(world_size=3, devices=pool)

    assert first.collective_rpc("rank", LONG) == [0, 1]


class FullForAWhile(FakeGpus):
    """The device that is asked for first, once *slow* is set, stays full for a while."""

    is_slow = False
    first = ""
    left = 30  # questions

    def used_bytes(self, uuid: str) -> int | None:
        if not self.is_slow:
            return 0
        self.first = self.first or uuid
        is_full = uuid == self.first and self.left > 0
        self.left -= is_full
        return 40 * GIB if is_full else 0


def test_a_group_that_has_grown_awaits_the_memory_of_all_of_its_ranks_as_it_closes(
    make: Make,
) -> None:
    gpus = FullForAWhile(4)
    ex = make(devices=DevicePool.of("auto", 4, gpus, {}))
    ex.resize(4, timeout=LONG)
    gpus.is_slow = True

    ex.close()

    assert gpus.left == 0


def test_a_rank_knows_its_devices_as_torch_calls_them(make: Make) -> None:
    pool = DevicePool.of("auto", 4, FakeGpus(4), {})
    two = make(world_size=2, devices=Devices(names=pool, per_rank=2))

    def names(worker: Any) -> tuple[str, tuple[str, ...]]:
        return worker.ctx.device, worker.ctx.devices

    assert two.collective_rpc(names, LONG) == [("cuda:0", ("cuda:0", "cuda:1"))] * 2
    two.close()
    every = make(world_size=2, devices=Devices(names=pool, visibility="all"))
    assert every.collective_rpc(names, LONG) == [("cuda:0", ("cuda:0",)), ("cuda:1", ("cuda:1",))]


def test_a_spare_sees_no_device_until_it_takes_a_rank(make: Make) -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {})
    ex = make(devices=pool, standby=1)
    wait_for_view(ex, lambda view: view.standby == 1)
    assert [one.leased for one in pool.status()] == [1.0, 0.0]

    kill(ex)

    assert seen(ex) == gpus.uuid(0)


def test_executors_of_one_runtime_that_ask_for_the_same_share_it(runtime: Any) -> None:
    first, second = (runtime.devices(None, 1) for _ in range(2))

    assert first is second
    first.close()
    second.close()
