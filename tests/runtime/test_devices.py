"""One device for each rank, and never more leases than devices."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from phalanx.runtime.devices import DevicePool
from phalanx.runtime.gpus import Gpu, NvmlInventory, ProcInventory, find_gpus, visible
from phalanx.runtime.testing import FakeGpus
from phalanx.supervision import SpecError

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
    with pytest.raises(SpecError, match="every device is leased"):
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

    with pytest.raises(SpecError):
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
        "import os, sys; from phalanx.runtime.gpus import find_gpus; g = find_gpus(); g.gpus();"
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
