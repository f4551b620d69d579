"""What the tests with a real engine share: a reason to skip them, and the program that they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.integrations.vllm.compat import installed_version

ROOT = Path(__file__).parents[2]
_LONG = 1500  # seconds; on a loaded machine two engines take minutes to start
_SHM = Path("/dev/shm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = installed_version() is None
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("vllm")
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


@pytest.fixture
def said_by(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a program of this folder with a folder and these words; return what it has said."""

    def run(program: str, *words: str) -> dict[str, Any]:
        command = [sys.executable, str(Path(__file__).with_name(program)), str(tmp_path), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LONG, check=False)
        assert done.returncode == 0, done.stderr[-6000:]
        said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return said

    return run


@pytest.fixture
def survive() -> Callable[..., dict[str, Any]]:
    """Run the benchmark with these options; return its result and check what it left behind."""

    def run(*options: str, **environment: str) -> dict[str, Any]:
        before = {entry.name for entry in _SHM.iterdir()}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.vllm.survive", *options, "--json"],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_LONG,
            check=False,
        )
        assert done.stdout.strip(), done.stderr[-4000:]
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        result["said"] = done.stderr
        left = {entry.name for entry in _SHM.iterdir() if entry.name.startswith("phx")} - before
        assert not left
        return result

    return run
