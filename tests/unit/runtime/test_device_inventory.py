"""Which devices a machine has, for whoever sees them through a mask or without a driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.runtime.devices.gpu import Gpu, visible
from phalanx.runtime.devices.inventory import ProcInventory, find_gpus
from phalanx.runtime.devices.nvml import NvmlInventory
from phalanx.runtime.devices.pool import DevicePool
from phalanx.testing import FakeGpus

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 58
GPU UUID: \t GPU-{uuid}
Video BIOS: \t 96.00
Bus Location: \t {bus}
"""


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
        "import sys; from phalanx.runtime import find_gpus; g = find_gpus(); g.gpus();"
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
