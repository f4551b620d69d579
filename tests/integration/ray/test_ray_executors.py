"""An executor whose ranks live on a real Ray: it serves, loses a machine, and goes on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.markdown import program_of
from tests.support.processes import wait_until
from tests.support.programs import run_python
from tests.support.ray_cluster import RayCluster
from tests.support.workers import Reducer

from phalanx.actors import Executor, Launch
from phalanx.cluster import NodeFenced, NodeLost, Ray
from phalanx.runtime import Runtime
from phalanx.supervision import Intensity

Machines = Callable[..., RayCluster]
ROOT = Path(__file__).parents[3]
PATIENCE = 150.0  # seconds; Ray starts a process in ten


def test_ranks_on_two_machines_of_ray_serve_lose_one_and_go_on(
    machines: Machines, torch_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = machines(2)
    for name, value in ray.environment.items():
        monkeypatch.setitem(os.environ, name, value)
    cluster = Ray(address=ray.address, ranks_per_node=2, node_timeout=3.0, node_wait=PATIENCE)
    told: list[object] = []

    with Executor(
        Reducer,
        4,
        cluster=cluster,
        devices="cpu",
        intensity=Intensity(1, PATIENCE),
        launch=Launch(preload=("torch",)),
        runtime=torch_runtime,
    ) as group:
        group.subscribe(told.append)
        assert group.collective_rpc("total", PATIENCE, (1.0,)) == [10.0] * 4
        assert "ray" not in sys.modules
        assert {each.state for each in group.status().nodes} == {"up"}

        ray.remove("b", graceful=False)
        wait_until(lambda: any(isinstance(event, NodeLost) for event in told))
        ray.add("c")

        assert group.collective_rpc("total", PATIENCE, (2.0,), retries=3) == [20.0] * 4
        assert group.status().restarts == 1
        wait_until(lambda: any(isinstance(event, NodeFenced) for event in told))
    wait_until(lambda: ray.available().get("CPU") == 4.0)


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
