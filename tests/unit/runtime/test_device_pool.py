"""Never more of a device is leased than there is, shared or whole, and only those that are seen."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from tests.support.device_pools import lease_of, release

from phalanx.runtime.devices.allocation import Request
from phalanx.runtime.devices.inventory import Gpu, ProcInventory, visible
from phalanx.runtime.devices.pool import DevicePool
from phalanx.supervision import NoDevice, SpecError
from phalanx.testing import FakeGpus


def test_each_rank_sees_a_device_of_its_own_and_calls_it_the_first() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})

    leases = [lease_of(pool, rank) for rank in range(2)]

    assert [lease.devices[0] for lease in leases] == ["cuda:0", "cuda:0"]
    assert [lease.environment["CUDA_VISIBLE_DEVICES"] for lease in leases] == [
        "GPU-00000000-fake",
        "GPU-00000001-fake",
    ]


def test_without_a_gpu_there_are_cpu_slots_for_everybody() -> None:
    pool = DevicePool.of("auto", 64, FakeGpus(0), {}, release_timeout=0.0)

    leases = [lease_of(pool, rank) for rank in range(64)]

    assert {lease.devices[0] for lease in leases} == {"cpu"}
    assert pool.look() == {}
    assert pool.status() == ()
    assert all(release(pool, lease) for lease in leases)


def test_a_cpu_worker_sees_no_gpu_though_there_is_one() -> None:
    lease = lease_of(DevicePool.of("cpu", 4, FakeGpus(1), {}), 3)

    assert lease.devices[0] == "cpu"
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
    lease = lease_of(DevicePool.of([name], 1, FakeGpus(3), {}), 0)

    assert lease.gpus[0].index == 1


def test_a_device_named_twice_is_leased_twice() -> None:
    pool = DevicePool.of([0, 0], 2, FakeGpus(1), {})

    leases = [lease_of(pool, rank) for rank in range(2)]

    assert [str(lease) for lease in leases] == ["GPU-00000000-fake"] * 2
    with pytest.raises(NoDevice, match="0: Fake 0 is leased to"):
        lease_of(pool, 2)


def test_a_rank_gets_its_device_again() -> None:
    pool = DevicePool.of("auto", 3, FakeGpus(3), {})
    leases = [lease_of(pool, rank) for rank in range(3)]
    for rank in (2, 0):
        release(pool, leases[rank])

    again = lease_of(pool, 2)

    assert str(again) == str(leases[2])


def test_a_pool_may_be_shared_by_groups() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    first = lease_of(DevicePool.of(pool, 1), 0)

    second = lease_of(DevicePool.of(pool, 1), 0)

    assert str(first) != str(second)
    with pytest.raises(SpecError):
        DevicePool.of(pool, 3)


def test_a_lease_is_taken_back_once() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    lease = lease_of(pool, 0)
    release(pool, lease)
    other = lease_of(pool, 0)

    release(pool, lease)

    with pytest.raises(NoDevice):
        lease_of(pool, 0)
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


def test_devices_of_which_nothing_is_told_are_leased_again_at_once() -> None:
    pool = DevicePool(FakeGpus(1).gpus())
    lease = lease_of(pool, 0)

    assert release(pool, lease, 4711)

    pool.quarantine(0, "it is reset")
    pool.restore(0)
    assert lease_of(pool, 0)


def test_ranks_share_a_device_by_fractions() -> None:
    pool = DevicePool.of("auto", 8, FakeGpus(2), {}, devices_per_rank=0.25)

    leases = [lease_of(pool, rank, share=0.25) for rank in range(8)]

    assert [lease.gpus[0].index for lease in leases] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [one.leased for one in pool.status()] == [1.0, 1.0]
    with pytest.raises(NoDevice, match=r"wants 0\.25 of a device"):
        lease_of(pool, 8, share=0.25)


def test_ten_tenths_are_a_whole() -> None:
    pool = DevicePool.of("auto", 10, FakeGpus(1), {}, devices_per_rank=0.1)

    leases = [lease_of(pool, rank, share=0.1) for rank in range(10)]

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

    leases = [lease_of(pool, rank, share=2) for rank in range(2)]

    assert [lease.devices for lease in leases] == [("cuda:0", "cuda:1")] * 2
    assert leases[1].environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000002-fake,GPU-00000003-fake"
    with pytest.raises(SpecError, match=r"2 rank\(s\) can have 2 each"):
        DevicePool.of(pool, 3, devices_per_rank=2)


def test_all_devices_may_be_seen_each_under_one_name() -> None:
    gpus = FakeGpus(3)
    pool = DevicePool.of("auto", 3, gpus, {})

    leases = [lease_of(pool, rank, visibility="all") for rank in range(3)]

    assert [lease.devices[0] for lease in leases] == ["cuda:0", "cuda:1", "cuda:2"]
    assert {lease.environment["CUDA_VISIBLE_DEVICES"] for lease in leases} == {
        ",".join(gpu.uuid for gpu in gpus.gpus())
    }


def test_a_device_that_is_lost_is_shown_to_nobody() -> None:
    gpus = FakeGpus(3)
    gpus.lose(gpus.uuid(0))
    pool = DevicePool.of("auto", 2, gpus, {})

    lease = lease_of(pool, 0, visibility="all")

    assert lease.environment["CUDA_VISIBLE_DEVICES"] == "GPU-00000001-fake,GPU-00000002-fake"
    assert lease.devices[0] == "cuda:0"


def test_instances_are_leased_by_their_own_uuid_and_share_the_faults_of_their_gpu() -> None:
    gpus = FakeGpus(2, instances=2)
    pool = DevicePool.of("auto", 4, gpus, {})
    leases = [lease_of(pool, rank) for rank in range(2)]

    gpus.lose("MIG-00000000-0-fake")

    assert leases[1].environment == {"CUDA_VISIBLE_DEVICES": "MIG-00000000-1-fake"}
    assert set(pool.look()) == set(leases)
    assert str(lease_of(pool, 2)) == "MIG-00000001-0-fake"
    with pytest.raises(SpecError, match="one instance"):
        DevicePool.of("auto", 2, gpus, {}, devices_per_rank=2)


def test_two_ranks_that_had_one_device_in_turns_do_not_wait_for_each_other() -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {})
    had = (gpus.uuid(1),)

    leases = pool.acquire([Request(0, "a/0", had), Request(1, "a/1", had)])

    assert [str(lease) for lease in leases] == [gpus.uuid(1), gpus.uuid(0)]


def test_ranks_are_leased_devices_together_or_not_at_all() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    lease_of(pool, 1, holder="other/0")

    with pytest.raises(NoDevice):
        pool.acquire([Request(0), Request(1)])

    assert [one.state for one in pool.status()] == ["free", "leased"]
    assert pool.status()[1].holders == ("other/0",)


INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 58
GPU UUID: \t GPU-{uuid}
Video BIOS: \t 96.00
Bus Location: \t {bus}
"""


@pytest.mark.parametrize(
    ("mask", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1,9,0", [1]),
        ("1,1", [1]),
        ("GPU-00000002", [2]),
        ("GPU-0000000", []),
        ("NoDevFiles", []),
    ],
)
def test_the_users_mask_counts_as_it_does_for_cuda(mask: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(FakeGpus(3).gpus(), mask)] == indices


def test_a_masked_device_is_not_leased() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(3), {"CUDA_VISIBLE_DEVICES": "2"})

    assert str(lease_of(pool, 0)) == "GPU-00000002-fake"


def test_the_kernel_module_tells_of_its_devices_and_without_it_there_is_none(
    tmp_path: Path,
) -> None:
    for bus, uuid in (("0000:9b:00.0", "bbbb"), ("0000:1a:00.0", "aaaa")):
        folder = tmp_path / "gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(uuid=uuid, bus=bus))

    tmp_path.joinpath("gpus", "0000:00:00.0").mkdir()  # of one that has just been lost

    gpus = ProcInventory(tmp_path).gpus()

    assert gpus == (Gpu("GPU-aaaa", 0, "NVIDIA H200"), Gpu("GPU-bbbb", 1, "NVIDIA H200"))
    assert ProcInventory(tmp_path / "nothing").gpus() == ()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        (fault,) = ProcInventory(tmp_path).faults("GPU-aaaa")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (fault.kind, fault.fatal) == ("unknown", False)
