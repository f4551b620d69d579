"""Never more of a device is leased than there is, and what is not well is leased to nobody."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.runtime.device_events import DeviceQuarantined, DeviceRestored
from phalanx.runtime.devices import DevicePool
from phalanx.runtime.gpus import Fault, Gpu, visible
from phalanx.runtime.inventory import ProcInventory, find_gpus
from phalanx.runtime.lease import Request
from phalanx.runtime.nvml import NvmlInventory
from phalanx.runtime.testing import FakeGpus
from phalanx.supervision import NoDevice, SpecError

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def soon() -> float:
    return time.monotonic() + 60.0


def past() -> float:
    return time.monotonic() - 1.0


def test_each_rank_sees_a_device_of_its_own_and_calls_it_the_first() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})

    leases = [pool.acquire(rank) for rank in range(2)]

    assert [lease.device for lease in leases] == ["cuda:0", "cuda:0"]
    assert [lease.environment["CUDA_VISIBLE_DEVICES"] for lease in leases] == [
        "GPU-00000000-fake",
        "GPU-00000001-fake",
    ]


def test_without_a_gpu_there_are_cpu_slots_for_everybody() -> None:
    pool = DevicePool.of("auto", 64, FakeGpus(0), {})

    leases = [pool.acquire(rank) for rank in range(64)]

    assert {lease.device for lease in leases} == {"cpu"}
    assert all(pool.release(lease, past()) for lease in leases)


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
        pool.release(leases[rank], soon())

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
    pool.release(lease, soon())
    other = pool.acquire(0)

    pool.release(lease, soon())

    with pytest.raises(NoDevice):
        pool.acquire(0)
    assert pool.release(other, soon())


def test_a_lease_is_taken_back_when_the_memory_is_released() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.gpus()[0].uuid
    gpus.use(uuid, 2 * GIB)  # somebody else's, there before
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = pool.acquire(0)
    gpus.use(uuid, 40 * GIB, 39 * GIB, 2 * GIB)

    free = pool.release(lease, soon())

    assert free
    assert gpus.used_bytes(uuid) == 2 * GIB  # all steps were waited for


def test_a_device_that_stays_full_is_reported_at_the_deadline() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = pool.acquire(0)
    gpus.use(gpus.gpus()[0].uuid, 40 * GIB)

    assert not pool.release(lease, past())


def quarantined(pool: DevicePool) -> dict[str, str]:
    return {one.device: one.reason for one in pool.status() if one.state == "quarantined"}


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
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = pool.acquire(0)
    gpus.hold(uuid, {1: 20 * GIB})  # it has grown meanwhile
    gpus.use(uuid, 20 * GIB)

    assert pool.release(lease, past(), 4711)


def test_memory_that_a_dead_process_is_still_listed_with_is_not_released() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = pool.acquire(0)
    gpus.hold(uuid, {4711: 30 * GIB})
    gpus.use(uuid, 30 * GIB)

    assert not pool.release(lease, past(), 4711)


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
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = pool.acquire(0)
    gpus.use(gpus.uuid(0), None)

    assert not pool.release(lease, past())

    assert "cannot be measured any more" in quarantined(pool)[gpus.uuid(0)]
    gpus.use(gpus.uuid(0), 0)
    assert pool.acquire(0)


def test_a_device_that_nobody_can_measure_is_leased_again_at_once() -> None:
    gpus = FakeGpus(1)
    gpus.use(gpus.uuid(0), None)
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = pool.acquire(0)

    assert pool.release(lease, past())
    assert pool.acquire(0)


@pytest.mark.parametrize(
    ("fault", "fatal"),
    [
        (Fault("lost", "GPU is lost", fatal=True), True),
        (Fault("xid", "Xid 79", fatal=True), True),
        (Fault("xid", "Xid 94"), False),
        (Fault("ecc", "2 uncorrected ECC error(s)", count=2), False),
        (Fault("recovery", "it asks for a reset", fatal=True), True),
        (Fault("unknown", "NVML: Unknown Error"), False),
    ],
)
def test_a_device_with_a_fault_is_not_leased_and_one_that_is_leased_says_so(
    fault: Fault, fatal: bool
) -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {})
    held = pool.acquire(0, holder="a/0")

    gpus.fail(gpus.uuid(0), fault)
    gpus.fail(gpus.uuid(1), fault)
    broken = pool.look()

    assert broken == ({held: f"device {gpus.uuid(0)}: {fault}"} if fatal else {})
    with pytest.raises(NoDevice, match="1: Fake 1 is in quarantine"):
        pool.acquire(1)


def test_a_device_that_recovers_from_its_fault_is_leased_again() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    gpus.lose(gpus.uuid(0))
    with pytest.raises(NoDevice):
        pool.acquire(0)

    gpus.heal(gpus.uuid(0))

    assert pool.acquire(0)


def test_what_is_found_while_a_lease_is_refused_is_told() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    told: list[Any] = []
    pool.subscribe(told.append)
    gpus.lose(gpus.uuid(0))

    with pytest.raises(NoDevice):
        pool.acquire(0)

    assert [(event.event, event.fatal) for event in told] == [("phalanx.device_quarantined", True)]


def test_a_fault_that_the_user_accepts_counts_no_more_and_the_next_one_does() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    gpus.report_xid(gpus.uuid(0), 94)
    with pytest.raises(NoDevice):
        pool.acquire(0)

    pool.restore(gpus.uuid(0))
    lease = pool.acquire(0)
    pool.release(lease, soon())
    gpus.report_xid(gpus.uuid(0), 94)

    with pytest.raises(NoDevice, match="Xid 94"):
        pool.acquire(0)


def test_a_fault_may_be_tolerated_from_the_start() -> None:
    gpus = FakeGpus(1)
    gpus.fail(gpus.uuid(0), Fault("ecc", "1 uncorrected ECC error(s)"))
    pool = DevicePool.of("auto", 1, gpus, {}, tolerate=lambda fault: fault.kind == "ecc")

    assert pool.acquire(0)


def test_the_user_may_put_a_device_aside() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    pool.quarantine("cuda:0", "its fan rattles")

    lease = pool.acquire(0)

    assert str(lease) == "GPU-00000001-fake"
    assert quarantined(pool) == {"GPU-00000000-fake": "its fan rattles"}
    pool.look()
    assert quarantined(pool)  # nothing but the user's word takes it up again
    pool.restore(0)
    assert pool.acquire(0)
    with pytest.raises(SpecError, match="device='GPU-7'"):
        pool.restore("GPU-7")


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
    with pytest.raises(SpecError, match="devices_per_rank="):
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


def test_on_a_shared_device_a_dead_process_must_have_left_the_list() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    pool = DevicePool.of("auto", 2, gpus, {}, devices_per_rank=0.5)
    first, second = (pool.acquire(rank, share=0.5) for rank in range(2))
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
    assert second in {*pool._rack.slots()[0].leases}


def test_on_a_shared_device_the_rest_is_found_when_the_last_one_leaves() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 2, gpus, {}, devices_per_rank=0.5)
    first, second = (pool.acquire(rank, share=0.5) for rank in range(2))
    gpus.use(gpus.uuid(0), 30 * GIB)

    assert pool.release(first, soon())  # whose those 30 GiB are nobody can tell
    assert not pool.release(second, past())

    assert quarantined(pool)


def test_cpu_slots_keep_the_rules_of_devices() -> None:
    pool = DevicePool(None, slots=2)

    leases = [pool.acquire(rank, holder=f"a/{rank}") for rank in range(2)]

    assert [lease.names for lease in leases] == [("cpu:0",), ("cpu:1",)]
    with pytest.raises(NoDevice, match="cpu:1 is leased to a/1"):
        pool.acquire(2)
    with pytest.raises(SpecError, match="world_size=3"):
        DevicePool.of(pool, 3)
    pool.give_back(leases[1])
    pool.quarantine("cpu:1", "noisy neighbour")
    with pytest.raises(NoDevice, match="noisy neighbour"):
        pool.acquire(1)


def test_endless_cpu_slots_are_used_again() -> None:
    pool = DevicePool.of("cpu", 2)
    leases = [pool.acquire(rank) for rank in range(3)]
    pool.give_back(leases[1])
    pool.quarantine("cpu:1", "noisy neighbour")

    again = [pool.acquire(1), pool.acquire(9)]

    assert [lease.names[0] for lease in (*leases, *again)] == [
        "cpu:0",
        "cpu:1",
        "cpu:2",
        "cpu:3",
        "cpu:4",
    ]


def test_cpu_slots_of_groups_that_share_a_pool_have_names_of_their_own() -> None:
    pool = DevicePool.of("cpu", 1)

    leases = [
        lease
        for size in (1, 2, 3)
        for lease in pool.acquire_all([Request(rank, f"{size}/{rank}") for rank in range(size)])
    ]

    assert len({lease.names for lease in leases}) == 6


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


def test_what_keeps_a_device_is_told_and_survives_pickling() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    pool.acquire(0, holder="embed/0")
    with pytest.raises(NoDevice) as refused:
        pool.acquire(0, holder="rank/0")

    copy = pickle.loads(pickle.dumps(refused.value))

    assert str(copy) == "no room for rank/0, which wants a device: 0: Fake 0 is leased to embed/0"
    assert copy.leased == {"0: Fake 0": ("embed/0",)}
    assert not copy.soon


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


def test_one_log_of_several_groups_hears_of_a_device_once() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    heard: list[Any] = []
    logged: list[Any] = []
    forget = [pool.subscribe(heard.append, logged.append) for _ in range(2)]

    pool.quarantine(0, "test")
    forget[0]()
    pool.restore(0)

    assert [event.event for event in heard] == [
        "phalanx.device_quarantined",
        "phalanx.device_quarantined",
        "phalanx.device_restored",
    ]
    assert len(logged) == 2


def test_the_driver_is_let_go_at_the_end() -> None:
    gpus = FakeGpus(1)

    DevicePool.of("auto", 1, gpus, {}).close()

    assert gpus.closed == 1


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

    assert str(pool.acquire(0)) == "GPU-00000002-fake"


INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 58
GPU UUID: \t GPU-{uuid}
Video BIOS: \t 96.00
Bus Location: \t {bus}
"""


def test_the_kernel_module_tells_of_its_devices(tmp_path: Path) -> None:
    for bus, uuid in (("0000:9b:00.0", "bbbb"), ("0000:1a:00.0", "aaaa")):
        folder = tmp_path / "gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION.format(uuid=uuid, bus=bus))

    gpus = ProcInventory(tmp_path).gpus()

    assert gpus == (Gpu("GPU-aaaa", 0, "NVIDIA H200"), Gpu("GPU-bbbb", 1, "NVIDIA H200"))


def test_no_kernel_module_means_no_gpu(tmp_path: Path) -> None:
    assert ProcInventory(tmp_path / "nothing").gpus() == ()


def test_nvml_without_a_driver_means_no_gpu() -> None:
    nvml: Any = pytest.importorskip("pynvml")
    inventory = NvmlInventory(nvml)

    gpus = inventory.gpus()
    inventory.close()

    assert gpus == () or all(gpu.uuid.startswith("GPU-") for gpu in gpus)


def test_looking_for_devices_loads_no_torch_and_opens_no_cuda() -> None:
    code = (
        "import sys; from phalanx.runtime.inventory import find_gpus; g = find_gpus(); g.gpus();"
        "maps = open('/proc/self/maps').read();"
        "print('torch' in sys.modules, 'libcuda.so' in maps)"
    )

    seen = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert seen.stdout.split() == ["False", "False"]


def test_the_inventory_of_this_machine_can_be_asked() -> None:
    inventory = find_gpus()

    for gpu in inventory.gpus():
        used = inventory.used_bytes(gpu.uuid)
        assert used is None or used >= 0
    inventory.close()
