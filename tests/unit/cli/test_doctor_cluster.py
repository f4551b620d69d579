"""`phalanx doctor --cluster`: what is said of the facts of a survey, without a Ray."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.cli import doctor_cluster, main
from phalanx.cli.doctor import Finding
from phalanx.cli.doctor_cluster import judge
from phalanx.supervision import RuntimeFault

HERE = {"python": "3.11.7", "phalanx": "0.2.0", "torch": "2.13.0", "pykka": "4.1"}
NODE: dict[str, Any] = {
    "python": "3.11.2",
    "phalanx": "0.2.0",
    "torch": "2.13.0",
    "kernel": "6.1.0",
    "shm": 1 << 30,
    "files": 4096,
    "memory_limit": 0.95,
    "memory_refresh": 0.0,
    "health_check": 65.0,
    "interface": "eth0",
    "round_trip": 0.0003,
    "rate": 1.2e9,
}
CLUSTER: dict[str, Any] = {"ray": "2.60.0", "address": "10.0.0.1", "token": True}


def findings(*, here: Any = HERE, cluster: Any = CLUSTER, **changed: Any) -> dict[str, Finding]:
    """Return the findings of a cluster of one node, of which some facts are others."""
    node = {name: fact for name, fact in {**NODE, **changed}.items() if fact is not None}
    return dict(judge({**cluster, "nodes": {"n": node}}, here, 10.0))


def test_a_cluster_that_lacks_nothing_is_well() -> None:
    found = findings()

    assert {finding.state for finding in found.values()} == {"ok"}
    assert {finding.remedy for finding in found.values()} == {""}
    assert found["ray"].found == "Ray 2.60.0, 1 nodes, authentication by token on"
    assert found["n network"].found == "reaches 10.0.0.1 by eth0: 0.30 ms, 1200 MB/s"


@pytest.mark.parametrize(
    ("check", "changed", "state", "told", "remedy"),
    [
        ("n versions", {"phalanx": "0.1.0"}, "missing", "phalanx 0.1.0", "phalanx 0.2.0"),
        ("n versions", {"phalanx": None}, "missing", "phalanx (none)", "phalanx 0.2.0"),
        ("n versions", {"torch": None}, "missing", "torch (none)", "torch 2.13.0"),
        ("n versions", {"python": "3.12.7"}, "missing", "python 3.12.7", "Python 3.11"),
        ("n system", {"lacks": "no memfd_create"}, "missing", "no memfd_create", "Linux 5.3"),
        ("n system", {"shm": 1 << 20}, "note", "1 MiB free in /dev/shm", "--shm-size"),
        ("n system", {"files": 256}, "note", "256 open files", "ulimit -n"),
        ("n system", {"files": -1}, "ok", "1024 MiB", ""),
        ("n network", {"not_reached": "timed out"}, "missing", "10.0.0.1: timed out", "bind"),
        ("n network", {"interface": None}, "ok", "by (unknown)", ""),
        ("memory monitor", {"memory_refresh": 250.0}, "note", "from 95%", "memory_usage_threshold"),
        ("health checks", {"health_check": 3.0}, "note", "for 3 s", "node_timeout=10 s"),
        ("health checks", {"health_check": None}, "ok", "unknown", ""),
        ("health checks", {"health_check": 10.0}, "ok", "for 10 s", ""),
    ],
)
def test_what_a_node_lacks_is_told_with_a_remedy(
    check: str, changed: dict[str, Any], state: str, told: str, remedy: str
) -> None:
    found = findings(**changed)

    assert found[check].state == state
    assert told in found[check].found
    assert remedy in found[check].remedy
    assert {name for name, each in found.items() if each.state != "ok"} <= {check}


def test_without_torch_on_this_machine_nodes_need_none() -> None:
    assert findings(here={**HERE, "torch": None}, torch=None)["n versions"].state == "ok"
    assert "no torch" not in findings(here={**HERE, "torch": None})["n versions"].found


@pytest.mark.parametrize(("token", "state"), [(False, "note"), (None, "ok")])
def test_a_ray_without_authentication_is_noted(token: bool | None, state: str) -> None:
    assert findings(cluster={**CLUSTER, "token": token})["ray"].state == state


def test_a_node_on_which_no_task_runs_is_told_and_hides_no_other() -> None:
    facts = {**CLUSTER, "nodes": {"a": {"error": "GetTimeoutError"}, "b": NODE}}

    found = dict(judge(facts, HERE, 10.0))

    assert (found["a"].state, found["a"].found) == ("missing", "GetTimeoutError")
    assert {found[name].state for name in found if name.startswith("b ")} == {"ok"}


def test_a_cluster_that_is_not_reached_is_told_and_nothing_else() -> None:
    (found,) = dict(judge({"error": "ConnectionError: none"}, HERE, 10.0)).items()

    assert (found[0], found[1].state, found[1].found) == ("ray", "missing", "ConnectionError: none")


def test_without_ray_the_remedy_is_told_and_the_code_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise RuntimeFault("Ray 2.51 is too old: pip install 'ray>=2.52'")

    monkeypatch.setattr(doctor_cluster, "check_ray_installed", missing)

    code = main(["doctor", "--cluster", "--json"])

    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (code, finding["state"]) == (1, "missing")
    assert "pip install" in finding["found"]


def test_an_address_that_ray_does_not_take_is_the_callers_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--cluster", "ray://10.0.0.1:10001"]) == 2
    assert "run the driver on a machine of the cluster" in capsys.readouterr().err
