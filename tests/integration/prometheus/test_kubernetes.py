"""docs/howto/kubernetes.yaml: its schema, its references, and its probes on a driver."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.prometheus.conftest import Served
from tests.support.processes import wait_until
from tests.support.programs import run_program

from phalanx import StopPolicy
from phalanx.integrations.prometheus import MetricsServer

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
ROOT = Path(__file__).parents[3]
DEPLOYMENT, SERVICE = yaml.safe_load_all((ROOT / "docs/howto/kubernetes.yaml").read_text())
POD: Any = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]
PORTS: dict[str, int] = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
BY_HTTP = [CONTAINER[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")]
STARTUP: Any = CONTAINER["startupProbe"]


def test_the_manifest_is_valid_in_each_version_of_kubernetes() -> None:
    validator: Any = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: make setup"
    )
    newest = int(validator.latest_version().split(".")[1])

    assert newest >= 37
    for minor in range(30, newest + 1):
        for manifest in (DEPLOYMENT, SERVICE):
            validator.validate(manifest, f"1.{minor}", strict=True)


def test_what_the_manifest_names_is_in_it() -> None:
    labels = POD["metadata"]["labels"]
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    volumes = {each["name"]: each["emptyDir"] for each in POD["spec"]["volumes"]}

    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"] == labels
    assert {each["targetPort"] for each in SERVICE["spec"]["ports"]} <= {*PORTS}
    assert {*mounts} == {*volumes}
    assert {volumes[name].get("medium") for name in mounts if mounts[name] == "/dev/shm"} == {
        "Memory"
    }
    assert {each["value"] for each in CONTAINER["env"]} <= {*mounts.values()}


def test_the_grace_period_has_room_for_all_that_ends_before_it() -> None:
    stop = StopPolicy()
    server = (ROOT / "examples/serve_fastapi.py").read_text()
    (requests,) = re.findall(r"timeout_graceful_shutdown=(\d+)", server)
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]

    ended = pause + int(requests) + stop.drain + stop.ask + stop.terminate

    assert ended < POD["spec"]["terminationGracePeriodSeconds"]


def test_each_probe_of_the_manifest_is_answered(served: Served) -> None:
    live, ready = (probe["path"] for probe in BY_HTTP)
    command, *words = STARTUP["exec"]["command"]
    start = [str(Path(sys.executable).parent / command), *words, served.name]
    wait_until(lambda: served.get(ready)[0] == 200)

    assert {PORTS[probe["port"]] for probe in BY_HTTP} == {
        inspect.signature(MetricsServer).parameters["port"].default
    }
    assert (served.get(live)[0], served.get(live + "s")[0]) == (200, 404)
    started = run_program(start)
    assert (started.returncode, started.stdout) == (0, "ok: 1 group\n")

    assert run_program([*start[:-1], "no-such-driver"]).returncode == 1
