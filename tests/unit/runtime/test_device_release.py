"""What a dead worker held is leased again when it is seen to be released, and not before."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.device_pools import GIB, quarantined, release
from tests.support.processes import soon

from phalanx.runtime.devices.events import DeviceQuarantined, DeviceRestored
from phalanx.runtime.devices.pool import DevicePool
from phalanx.supervision import NoDevice
from phalanx.testing import FakeGpus


def test_a_lease_is_taken_back_when_the_memory_is_released() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.gpus()[0].uuid
    gpus.use(uuid, 2 * GIB)  # somebody else's, there before
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = pool.acquire(0)
    gpus.use(uuid, 40 * GIB, 39 * GIB, 2 * GIB)

    free = release(pool, lease)

    assert free
    assert gpus.used_bytes(uuid) == 2 * GIB  # all steps were waited for


def test_a_device_that_stays_full_is_reported_at_the_deadline() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = pool.acquire(0)
    gpus.use(gpus.gpus()[0].uuid, 40 * GIB)

    assert not release(pool, lease)


def test_a_device_that_stays_full_is_put_aside_and_another_is_leased() -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {}, release_timeout=0.0)
    lease = pool.acquire(0, holder="embed/0")
    gpus.use(gpus.uuid(0), 40 * GIB)

    pool.give_back(lease, 4711)
    again = pool.acquire(0, again=lease.names)

    assert str(again) == gpus.uuid(1)
    reason = quarantined(pool)[gpus.uuid(0)]
    assert reason == (
        "40.0 GiB in use, 0.0 GiB before embed/0 (pid 4711, dead) held it: not released in time"
    )


def test_a_device_is_leased_again_when_its_memory_comes_back_late() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    told: list[Any] = []
    pool.subscribe(told.append)
    lease = pool.acquire(0)
    gpus.use(gpus.uuid(0), 40 * GIB)
    pool.give_back(lease)
    with pytest.raises(NoDevice) as refused:
        pool.acquire(0)
    gpus.use(gpus.uuid(0), 0)

    again = pool.acquire(0)

    assert str(again) == gpus.uuid(0)
    assert "not released" in refused.value.quarantined["0: Fake 0"]
    assert [type(event) for event in told] == [DeviceQuarantined, DeviceRestored]
    assert (told[0].cause, told[1].why) == ("memory", "recovered")


def test_a_rank_waits_for_its_own_device_rather_than_taking_another() -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {})
    lease = pool.acquire(0)
    gpus.use(gpus.uuid(0), 40 * GIB, 40 * GIB, 0)
    pool.give_back(lease)

    with pytest.raises(NoDevice) as refused:
        pool.acquire(0, again=lease.names)
    again = pool.acquire(0, again=lease.names)

    assert refused.value.soon
    assert str(again) == gpus.uuid(0)


def test_what_other_programs_use_is_taken_out_of_the_sum() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    gpus.hold(uuid, {1: 2 * GIB})  # somebody else, there before
    gpus.use(uuid, 2 * GIB)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = pool.acquire(0)
    gpus.hold(uuid, {1: 20 * GIB})  # it has grown meanwhile
    gpus.use(uuid, 20 * GIB)

    assert release(pool, lease, 4711)


def test_memory_that_a_dead_process_is_still_listed_with_is_not_released() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = pool.acquire(0)
    gpus.hold(uuid, {4711: 30 * GIB})
    gpus.use(uuid, 30 * GIB)

    assert not release(pool, lease, 4711)


def test_memory_that_somebody_else_takes_unseen_is_taken_for_a_dead_workers() -> None:
    # In a container nobody is listed; then it can only be put aside, until the user knows better.
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = pool.acquire(0)
    gpus.use(gpus.uuid(0), 20 * GIB)
    pool.give_back(lease)
    assert quarantined(pool)

    pool.restore(0)

    assert pool.acquire(0).used_bytes == 20 * GIB
    assert not quarantined(pool)


def test_an_nvml_that_fails_midway_is_not_taken_for_a_release() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = pool.acquire(0)
    gpus.use(gpus.uuid(0), None)

    assert not release(pool, lease)

    assert "cannot be measured any more" in quarantined(pool)[gpus.uuid(0)]
    gpus.use(gpus.uuid(0), 0)
    assert pool.acquire(0)


def test_a_device_that_nobody_can_measure_is_leased_again_at_once() -> None:
    gpus = FakeGpus(1)
    gpus.use(gpus.uuid(0), None)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = pool.acquire(0)

    assert release(pool, lease)
    assert pool.acquire(0)


def test_on_a_shared_device_a_dead_process_must_have_left_the_list() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    pool = DevicePool.of("auto", 2, gpus, {}, devices_per_rank=0.5)
    first, _ = (pool.acquire(rank, share=0.5) for rank in range(2))
    gpus.use(uuid, 30 * GIB)
    gpus.hold(uuid, {1: 10 * GIB, 2: 20 * GIB})

    pool.give_back(first, 1)
    with pytest.raises(NoDevice) as refused:
        pool.acquire(0, share=0.5, again=first.names)
    gpus.hold(uuid, {2: 20 * GIB})
    gpus.use(uuid, 20 * GIB)

    assert refused.value.soon
    assert pool.settle([first], soon())
    assert pool.acquire(0, share=0.5)
    assert pool.status()[0].leased == 1.0


def test_on_a_shared_device_the_rest_is_found_when_the_last_one_leaves() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 2, gpus, {}, devices_per_rank=0.5, release_timeout=0.0)
    first, second = (pool.acquire(rank, share=0.5) for rank in range(2))
    gpus.use(gpus.uuid(0), 30 * GIB)

    assert release(pool, first)  # whose those 30 GiB are nobody can tell
    assert not release(pool, second)

    assert quarantined(pool)
