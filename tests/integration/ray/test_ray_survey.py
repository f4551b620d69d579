"""`phalanx doctor --cluster` on a real Ray of two nodes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.support.programs import run_program
from tests.support.ray_cluster import RayCluster

from phalanx.cli.doctor import versions


def survey(*words: str, **environment: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "phalanx.cli", "doctor", "--json", "--cluster", *words]
    done = run_program(command, timeout=300.0, env={**os.environ, **environment})
    told = json.loads(done.stdout)
    return done.returncode, {each["name"]: each for each in told["findings"]}


def test_each_node_is_looked_at_from_inside_and_nothing_is_left(
    machines: Callable[..., RayCluster],
) -> None:
    ray = machines(
        2, RAY_memory_usage_threshold="0.5", RAY_health_check_failure_threshold="3",
        RAY_health_check_period_ms="500", RAY_health_check_timeout_ms="500",
    )  # fmt: skip
    free = ray.available()

    code, found = survey(ray.address, **ray.environment)

    nodes = {name.rpartition(" ")[0] for name in found if name.endswith(" network")}
    assert len(nodes) == 3  # the head too
    for node in nodes:
        own = versions()
        assert (
            f"phalanx {own['phalanx']}, torch {own['torch']}" in found[f"{node} versions"]["found"]
        )
        assert found[f"{node} versions"]["state"] == "ok"
        assert "MiB free in /dev/shm" in found[f"{node} system"]["found"]
        assert found[f"{node} network"]["state"] == "ok"
        assert " MB/s" in found[f"{node} network"]["found"]
        assert " by (unknown)" not in found[f"{node} network"]["found"]
    assert "3 nodes, authentication by token off" in found["ray"]["found"]
    assert (found["memory monitor"]["state"], "50%" in found["memory monitor"]["found"]) == (
        "note",
        True,
    )
    assert found["health checks"]["found"] == "end a node that is silent for 3 s"
    assert found["health checks"]["state"] == "note"
    assert code == 0
    assert ray.available() == free


def test_a_ray_that_is_not_there_is_told() -> None:
    code, found = survey("127.0.0.1:9", RAY_ADDRESS="")

    assert (code, found["ray"]["state"]) == (1, "missing")
    assert "127.0.0.1" in found["ray"]["found"] or "refused" in found["ray"]["found"]
    assert "--cluster HOST:PORT" in found["ray"]["remedy"]
