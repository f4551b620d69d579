"""Never more of a device is leased than there is, and what is not well is leased to nobody."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.device_pools import release

from phalanx.runtime.devices.pool import DevicePool
from phalanx.supervision import NoDevice, SpecError
from phalanx.testing import FakeGpus


def test_each_rank_sees_a_device_of_its_own_and_calls_it_the_first() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})

    leases = [pool.acquire(rank) for rank in range(2)]

    assert [lease.device for lease in leases] == ["cuda:0", "cuda:0"]
    assert [lease.environment["CUDA_VISIBLE_DEVICES"] for lease in leases] == [
        "GPU-00000000-fake",
        "GPU-00000001-fake",
    ]


def test_without_a_gpu_there_are_cpu_slots_for_everybody() -> None:
    pool = DevicePool.of("auto", 64, FakeGpus(0), {}, release_timeout=0.0)

    leases = [pool.acquire(rank) for rank in range(64)]

    assert {lease.device for lease in leases} == {"cpu"}
    assert pool.look() == {}
    assert pool.status() == ()
    assert all(release(pool, lease) for lease in leases)


def test_a_cpu_worker_sees_no_gpu_though_there_is_one() -> None:
    lease = DevicePool.of("cpu", 4, FakeGpus(1), {}).acquire(3)

    assert lease.device == "cpu"
    assert lease.environment == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("devices", [None, "auto", "cuda", ["cuda:0", 1]])
def test_more_leases_than_devices_names_the_field_the_value_and_what_is_there(
    devices: Any,
) -> None:
    with pytest.raises(SpecError, match=r"world_size=3: 2 device\(s\) to lease \(0: Fake 0") as got:
        DevicePool.of(devices, 3, FakeGpus(2), {})

    assert (got.value.field, got.value.value) == ("world_size", 3)


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(SpecError, match="no GPU is visible here"):
        DevicePool.of("cuda", 1, FakeGpus(0), {})


@pytest.mark.parametrize("devices", ["tpu", ["cuda:7"], ["GPU-"], [None], [True], 3, [-1]])
def test_a_device_that_is_not_there_is_refused(devices: Any) -> None:
    with pytest.raises(SpecError, match="devices=") as got:
        DevicePool.of(devices, 1, FakeGpus(2), {})

    assert got.value.field == "devices"


@pytest.mark.parametrize("name", [1, "1", "cuda:1", "GPU-00000001-fake", "GPU-00000001"])
def test_a_device_is_found_by_index_and_by_uuid(name: Any) -> None:
    lease = DevicePool.of([name], 1, FakeGpus(3), {}).acquire(0)

    assert lease.gpu is not None
    assert lease.gpu.index == 1


def test_a_device_named_twice_is_leased_twice() -> None:
    pool = DevicePool.of([0, 0], 2, FakeGpus(1), {})

    leases = [pool.acquire(rank) for rank in range(2)]

    assert [str(lease) for lease in leases] == ["GPU-00000000-fake"] * 2
    with pytest.raises(NoDevice, match="0: Fake 0 is leased to"):
        pool.acquire(2)


def test_a_rank_gets_its_device_again() -> None:
    pool = DevicePool.of("auto", 3, FakeGpus(3), {})
    leases = [pool.acquire(rank) for rank in range(3)]
    for rank in (2, 0):
        release(pool, leases[rank])

    again = pool.acquire(2)

    assert str(again) == str(leases[2])


def test_a_pool_may_be_shared_by_groups() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    first = DevicePool.of(pool, 1).acquire(0)

    second = DevicePool.of(pool, 1).acquire(0)

    assert str(first) != str(second)
    with pytest.raises(SpecError):
        DevicePool.of(pool, 3)


def test_a_lease_is_taken_back_once() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    lease = pool.acquire(0)
    release(pool, lease)
    other = pool.acquire(0)

    release(pool, lease)

    with pytest.raises(NoDevice):
        pool.acquire(0)
    assert release(pool, other)


def test_a_shared_pool_lets_go_when_the_last_one_has() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    for _ in range(2):
        DevicePool.of(pool, 1)
    pool.close()
    pool.close()
    assert gpus.closed == 0

    pool.close()

    assert gpus.closed == 1
