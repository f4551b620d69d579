"""Ranks may share a device, or have several."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.runtime.devices.lease import Request
from phalanx.runtime.devices.pool import DevicePool
from phalanx.supervision import NoDevice, SpecError
from phalanx.testing import FakeGpus


def test_ranks_share_a_device_by_fractions() -> None:
    pool = DevicePool.of("auto", 8, FakeGpus(2), {}, devices_per_rank=0.25)

    leases = [pool.acquire(rank, share=0.25) for rank in range(8)]

    assert [lease.gpu.index for lease in leases if lease.gpu] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [one.leased for one in pool.status()] == [1.0, 1.0]
    with pytest.raises(NoDevice, match=r"wants 0\.25 of a device"):
        pool.acquire(8, share=0.25)


def test_ten_tenths_are_a_whole() -> None:
    pool = DevicePool.of("auto", 10, FakeGpus(1), {}, devices_per_rank=0.1)

    leases = [pool.acquire(rank, share=0.1) for rank in range(10)]

    assert len(leases) == 10


def test_fractions_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(SpecError, match=r"1 rank\(s\) can have 0\.6 each"):
        DevicePool.of("auto", 2, FakeGpus(1), {}, devices_per_rank=0.6)


@pytest.mark.parametrize("share", [0, -1, 1.5, True, float("nan"), float("inf"), "half"])
def test_a_share_that_makes_no_sense_is_refused(share: Any) -> None:
    with pytest.raises(SpecError, match="devices.per_rank="):
        DevicePool.of("cpu", 1, devices_per_rank=share)


def test_a_rank_may_have_several_devices() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(4), {}, devices_per_rank=2)

    leases = [pool.acquire(rank, share=2) for rank in range(2)]

    assert [lease.devices for lease in leases] == [("cuda:0", "cuda:1")] * 2
    assert leases[1].environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000002-fake,GPU-00000003-fake"
    with pytest.raises(SpecError, match=r"2 rank\(s\) can have 2 each"):
        DevicePool.of(pool, 3, devices_per_rank=2)


def test_all_devices_may_be_seen_each_under_one_name() -> None:
    gpus = FakeGpus(3)
    pool = DevicePool.of("auto", 3, gpus, {})

    leases = [pool.acquire(rank, visibility="all") for rank in range(3)]

    assert [lease.device for lease in leases] == ["cuda:0", "cuda:1", "cuda:2"]
    assert {lease.environment["CUDA_VISIBLE_DEVICES"] for lease in leases} == {
        ",".join(gpu.uuid for gpu in gpus.gpus())
    }


def test_a_device_that_is_lost_is_shown_to_nobody() -> None:
    gpus = FakeGpus(3)
    gpus.lose(gpus.uuid(0))
    pool = DevicePool.of("auto", 2, gpus, {})

    lease = pool.acquire(0, visibility="all")

    assert lease.environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000001-fake,GPU-00000002-fake"
    assert lease.device == "cuda:0"


def test_instances_are_leased_by_their_own_uuid_and_share_the_faults_of_their_gpu() -> None:
    gpus = FakeGpus(2, instances=2)
    pool = DevicePool.of("auto", 4, gpus, {})
    leases = [pool.acquire(rank) for rank in range(2)]

    gpus.lose("MIG-00000000-0-fake")

    assert leases[1].environment == {"CUDA_VISIBLE_DEVICES": "MIG-00000000-1-fake"}
    assert set(pool.look()) == set(leases)
    assert str(pool.acquire(2)) == "MIG-00000001-0-fake"
    with pytest.raises(SpecError, match="one instance"):
        DevicePool.of("auto", 2, gpus, {}, devices_per_rank=2)


def test_two_ranks_that_had_one_device_in_turns_do_not_wait_for_each_other() -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {})
    had = (gpus.uuid(1),)

    leases = pool.acquire_all([Request(0, "a/0", had), Request(1, "a/1", had)])

    assert [str(lease) for lease in leases] == [gpus.uuid(1), gpus.uuid(0)]


def test_ranks_are_leased_devices_together_or_not_at_all() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    pool.acquire(1, holder="other/0")

    with pytest.raises(NoDevice):
        pool.acquire_all([Request(0), Request(1)])

    assert [one.state for one in pool.status()] == ["free", "leased"]
    assert pool.status()[1].holders == ("other/0",)
