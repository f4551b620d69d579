"""docs/howto/leaderworkerset.yaml: its schemas, and that driver and nodes find each other by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx import JoinedNodes
from phalanx.cli import parse
from phalanx.cluster.join.options import VARIABLE

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
ROOT = Path(__file__).parents[3]
MANIFEST: Any = yaml.safe_load((ROOT / "docs/howto/leaderworkerset.yaml").read_text())
GROUP: Any = MANIFEST["spec"]["leaderWorkerTemplate"]
TEMPLATES = [GROUP["leaderTemplate"], GROUP["workerTemplate"]]


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has these *properties* and no others."""
    names = {
        name: {"type": kind} if isinstance(kind, str) else kind for name, kind in properties.items()
    }
    return {
        "type": "object",
        "properties": names,
        "required": required,
        "additionalProperties": False,
    }


# Fields and values as the types of leaderworkerset.x-k8s.io/v1 have them, in
# api/leaderworkerset/v1/leaderworkerset_types.go of kubernetes-sigs/lws. Pod templates are
# Kubernetes' own, for which its schema is there.
SCHEMA = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=fields(["name"], name="string", namespace="string", labels="object"),
    spec=fields(
        ["leaderWorkerTemplate"],
        replicas="integer",
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=fields(
            ["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}
        ),
        rolloutStrategy="object",
        leaderWorkerTemplate=fields(
            ["workerTemplate"],
            size="integer",
            restartPolicy={
                "enum": [
                    "Default",
                    "RecreateGroupOnPodRestart",
                    "RecreateGroupAfterStart",
                    "None",
                ]
            },
            leaderTemplate="object",
            workerTemplate="object",
            subGroupPolicy="object",
            volumeClaimTemplates="array",
        ),
    ),
)


def test_the_manifest_is_valid() -> None:
    validator: Any = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: make setup"
    )
    jsonschema: Any = pytest.importorskip("jsonschema")
    newest = int(validator.latest_version().split(".")[1])

    jsonschema.validate(MANIFEST, SCHEMA)
    for minor in range(30, newest + 1):
        for template in TEMPLATES:
            pod = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "model"},
                "template": template,
            }
            validator.validate(pod, f"1.{minor}", strict=True)


def test_driver_and_nodes_have_one_port_one_key_and_one_image() -> None:
    (driver,), (node,) = (each["spec"]["containers"] for each in TEMPLATES)
    (port,) = (each["containerPort"] for each in driver["ports"])
    keys = [each for part in (driver, node) for each in part["env"] if each["name"] == VARIABLE]

    command = [word.replace("$(LWS_LEADER_ADDRESS)", "10.0.0.1") for word in node["command"]]
    assert parse(command[1:]).join == f"10.0.0.1:{port}"
    assert port == JoinedNodes(bind="10.0.0.1", ranks_per_node=8).port
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert driver["image"] == node["image"]
    assert GROUP["restartPolicy"] == "None"


def test_what_the_manifest_mounts_is_there() -> None:
    spec = GROUP["workerTemplate"]["spec"]
    mounts = {each["name"] for part in spec["containers"] for each in part["volumeMounts"]}

    assert mounts == {each["name"] for each in spec["volumes"]}
