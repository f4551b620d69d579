"""What a benchmark takes for itself is given back: it adopts what its processes leave behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.programs import run_python

from phalanx.runtime.linux import syscalls

ROOT = Path(__file__).parents[3]


def bench(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    words = ("-m", "benchmarks", *words)
    return run_python(*words, timeout=235, cwd=cwd, env=environment, stdin=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def _adopts_as_before() -> Iterator[None]:
    before = syscalls.is_subreaper()
    yield
    syscalls.set_subreaper(on=before)
