"""An executor whose ranks live on a real Ray: it serves, loses a machine, and goes on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.support.markdown import program_of
from tests.support.programs import run_python
from tests.support.ray_cluster import RayCluster

Machines = Callable[..., RayCluster]
ROOT = Path(__file__).parents[3]


def test_the_example_loses_a_machine_and_its_answers_are_right() -> None:
    done = run_python("examples/cluster_ray.py", "--passages", "250", cwd=ROOT, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost machine m0" in done.stdout
    assert "8 calls answered; restarts: 1\n" in done.stdout


def test_the_code_of_the_page_runs(machines: Machines, tmp_path: Path) -> None:
    ray, file = machines(3), tmp_path / "page.py"
    file.write_text(program_of(ROOT / "docs/howto/cluster.md"))
    environment = {**os.environ, **ray.environment, "RAY_ADDRESS": ray.address}

    done = run_python(str(file), env=environment, cwd=tmp_path, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert "[10.0, 10.0, 10.0, 10.0]" in said
    shown = [re.match(r"\S+ up (\(.*?\)) (\(.*?\)) \d", line) for line in said]
    assert sorted(found[1] for found in shown if found)[:2] == ["()", "(0, 1)"]
