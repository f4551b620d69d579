"""Checks of a Ray cluster for phalanx, on the result of a survey by a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from phalanx.cluster import Ray, check_ray_installed, version_mismatches
from phalanx.supervision import RuntimeFault

from .doctor import LEAST_FILES, LEAST_SHM_BYTES, Finding, judged, versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LIMIT = 300.0  # seconds for the survey
_REMEDY = "run this on a machine of the cluster, with --cluster HOST:PORT of Ray's head"


def examine_cluster(address: str) -> dict[str, Finding]:
    """Return what is found of the Ray at *address*, by the name of each check.

    Raises:
        SpecError: it is no address that `Ray` takes.
    """
    survey = "phalanx.cluster.ray.survey_main"
    command = [sys.executable, "-P", "-m", survey, Ray(address=address).address]
    try:
        check_ray_installed()
        # Ray is not for this process: it would leave threads and signal handlers here.
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_LIMIT, check=False)
        facts = json.loads(done.stdout.splitlines()[-1])
    except RuntimeFault as error:
        return {"ray": Finding("missing", str(error))}
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        facts = {"error": f"the survey has failed: {error}"}
    return dict(judge(facts, versions(), Ray().node_timeout))


def judge(
    facts: Mapping[str, Any], here: Mapping[str, str | None], node_timeout: float
) -> Iterator[tuple[str, Finding]]:
    """Yield the finding of each check of a survey, with its name.

    Args:
        facts: The result of the survey.
        here: The versions on this machine.
        node_timeout: Seconds, as of `Ray`.
    """
    if "error" in facts:
        yield "ray", Finding("missing", facts["error"], _REMEDY)
        return
    nodes: Mapping[str, Any] = facts["nodes"]
    mode = {True: "on", False: "off", None: "unknown"}[facts.get("token")]
    remedy = "RAY_AUTH_MODE=token; without it, access to Ray's ports allows running code there"
    detail = f"Ray {facts['ray']}, {len(nodes)} nodes, authentication by token {mode}"
    yield "ray", judged(detail, remedy * (mode == "off"))
    known = [node for node in nodes.values() if "error" not in node]
    limits = [node["memory_limit"] for node in known if node["memory_refresh"]]
    remedy = (
        "it may end a node for the memory of its ranks: raise RAY_memory_usage_threshold where Ray "
        "is started, or set RAY_memory_monitor_refresh_ms=0"
    )
    detail = f"on, from {min(limits):.0%} of a machine's memory" if limits else "off"
    yield "memory monitor", judged(detail, remedy * bool(limits))
    silence = min((node["health_check"] for node in known if "health_check" in node), default=None)
    remedy = (
        f"phalanx keeps such nodes for node_timeout={node_timeout:g} s: raise "
        "RAY_health_check_failure_threshold where Ray is started, or give a lower node_timeout"
    )
    detail = "unknown" if silence is None else f"end a node that is silent for {silence:g} s"
    is_quick = silence is not None and silence < node_timeout
    yield "health checks", judged(detail, remedy * is_quick)
    for name, node in nodes.items():
        if "error" in node:
            yield name, Finding("missing", node["error"], "Ray runs no task there: see its logs")
        else:
            yield f"{name} versions", _versions(node, here)
            yield f"{name} system", _system(node)
            yield f"{name} network", _network(node, facts["address"])


def _versions(node: Mapping[str, Any], here: Mapping[str, str | None]) -> Finding:
    wrong = [f"{name} {wanted}" for name, _, wanted in version_mismatches(node, here)]
    names = ("python", "phalanx", "torch")
    detail = ", ".join(f"{name} {node.get(name, '(none)')}" for name in names)
    remedy = f"install the versions of this machine: {', '.join(wrong)}"
    return judged(detail, remedy * bool(wrong), is_needed=True)


def _system(node: Mapping[str, Any]) -> Finding:
    detail = f"Linux {node['kernel']}, {node['shm'] >> 20} MiB free in /dev/shm"
    detail += f", {node['files']} open files" if node["files"] >= 0 else ""
    if "lacks" in node:
        remedy = "phalanx needs Linux 5.3, and a sandbox that allows pidfd_open and memfd_create"
        return Finding("missing", f"{detail}; {node['lacks']}", remedy)
    remedies = ["docker run --shm-size=1g"] * (node["shm"] < LEAST_SHM_BYTES)
    remedies += [f"ulimit -n {LEAST_FILES}"] * (0 <= node["files"] < LEAST_FILES)
    return judged(detail, ", ".join(remedies))


def _network(node: Mapping[str, Any], address: str) -> Finding:
    if "not_reached" in node:
        remedy = "let nodes reach all ports of this machine, or another address: Ray(bind=...)"
        return Finding("missing", f"does not reach {address}: {node['not_reached']}", remedy)
    way = f"reaches {address} by {node.get('interface') or '(unknown)'}"
    return Finding(
        "ok", f"{way}: {1000 * node['round_trip']:.2f} ms, {node['rate'] / 1e6:.0f} MB/s"
    )
