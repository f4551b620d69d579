"""What the tests on a GPU share: a pool of the machine's devices, or a reason to skip.

The process that runs the tests is a driver as it should be: it sees no GPU (the mask of CUDA is
empty in it) and never starts CUDA. Its workers get theirs from the pool.
"""

from __future__ import annotations

import contextlib
import os
import runpy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.options import with_defaults

from phalanx.actors import Executor
from phalanx.runtime import DevicePool, Runtime, find_gpus
from phalanx.runtime.devices.inventory import visible
from phalanx.supervision import Strategy


def mask() -> dict[str, str]:
    """The user's own mask; the empty one is the one that all tests set."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": given} if given else {}


def count() -> int:
    """How many devices there are."""
    inventory = find_gpus()
    try:
        return len(visible(inventory.gpus(), mask().get("CUDA_VISIBLE_DEVICES")))
    finally:
        inventory.close()


def missing() -> str:
    """Why the tests here cannot run; empty where they can."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    about = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if not about.get("cuda"):
        return f"torch {about['__version__']} is built without CUDA"
    if find_spec("pynvml") is None:
        return "nvidia-ml-py is not installed: pip install 'phalanx[gpu]'"
    return "" if count() else "there is no NVIDIA GPU here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    reason = missing() if mine else ""
    for item in mine:
        needs = next((mark.args[0] for mark in item.iter_markers("gpus")), 1)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif needs > 1 and count() < needs:
            item.add_marker(pytest.mark.skip(reason=f"needs {needs} GPUs"))


@pytest.fixture(scope="session", autouse=True)
def _nvml() -> Iterator[None]:
    """Hold NVML open throughout: what it opens once is no leak of a test."""
    nvml: Any = pytest.importorskip("pynvml")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            held.callback(nvml.nvmlShutdown)
        yield


@pytest.fixture
def pool(phalanx_leak_check: None) -> Iterator[DevicePool]:
    """Every device of this machine, whole ones or parts."""
    with DevicePool.of("cuda", 1, environment=mask(), release_timeout=30.0) as pool:
        yield pool


@pytest.fixture
def build(
    pool: DevicePool, torch_runtime: Runtime, make: Callable[..., Executor[Any]]
) -> Callable[..., Executor[Any]]:
    """Builds executors whose ranks have devices from the pool."""

    def build(worker: Any, world_size: int = 1, **options: Any) -> Executor[Any]:
        usual = with_defaults(
            options,
            devices={"names": pool},
            launch={"preload": ("torch",)},
            runtime=torch_runtime,
            limits={"start": 100.0},
            strategy=Strategy.ONE_FOR_ONE,
            intensity=(100, 60.0),
        )
        return make(worker, world_size, **usual)

    return build
