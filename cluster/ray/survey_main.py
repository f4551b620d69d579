"""Survey of a Ray cluster for ``phalanx doctor``: properties of it and of its nodes, as JSON.

A task on each node reports them, with the standard library alone: a node may lack phalanx. It
connects to a port of this machine that the kernel has chosen, as node processes do.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from ray import _raylet
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .broker_main import check_reachable, text_of

_TASK = 60.0  # seconds for a task, for which Ray starts a process
_TASKS = 240.0  # for all of them; `phalanx doctor` waits for 300
_CONNECT = 10.0
_ROUNDS = 50
_BYTES = 32 << 20
_MEMORY_MONITOR = {  # the variables that Ray goes by, and without them
    "memory_limit": ("RAY_memory_usage_threshold", "0.95"),
    "memory_refresh": ("RAY_memory_monitor_refresh_ms", "250"),
}


def examine(address: tuple[str, int]) -> dict[str, Any]:
    """Return what the node is that this runs on; `serve` listens at *address*."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "shm": shutil.disk_usage("/dev/shm").free,  # noqa: S108  # looked at, not written to
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    }
    for name, (variable, usual) in _MEMORY_MONITOR.items():
        found[name] = float(os.environ.get(variable, usual))
    for package in ("phalanx", "torch"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    with suppress(AttributeError):  # it is no public name of Ray's
        config = _raylet.Config
        each = config.health_check_period_ms() + config.health_check_timeout_ms()
        found["health_check"] = config.health_check_failure_threshold() * each / 1000
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("phalanx-doctor"))
    except OSError as error:
        found["lacks"] = str(error)
    try:
        with socket.create_connection(address, _CONNECT) as link:
            link.settimeout(_TASK)  # others are served before
            link.recv(1)
            times = [time.perf_counter()]
            for size in (*[1] * _ROUNDS, _BYTES):
                link.sendall(bytes(size))
                link.recv(1)
                times.append(time.perf_counter())
            own = link.getsockname()[0]
    except OSError as error:
        return {**found, "not_reached": str(error)}
    with suppress(ImportError):
        module: Any = import_module("phalanx.cluster.node_process.network_interface")
        found["interface"] = module.interface_of(own)
    found["round_trip"] = (times[-2] - times[0]) / _ROUNDS
    found["rate"] = _BYTES / (times[-1] - times[-2])
    return found


def serve(listener: socket.socket) -> None:
    """Be the other end of one node after the other."""
    while True:
        link, _ = listener.accept()
        with link, suppress(OSError):
            link.settimeout(_CONNECT)
            link.sendall(b".")
            for size in (*[1] * _ROUNDS, _BYTES):
                left = size
                while left and (data := link.recv(min(left, 1 << 20))):
                    left -= len(data)
                link.sendall(b".")


def survey(address: str) -> dict[str, Any]:
    """Return what there is at *address*, which is as `Ray` takes it."""
    check_reachable(address)
    ray.init(address=address, logging_level="error", log_to_driver=False)
    here = get_node_ip_address()
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    listener = socket.create_server((here, 0), family=family)
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    found: dict[str, Any] = {"ray": ray.__version__, "address": here, "nodes": {}}
    with suppress(AttributeError):  # these are no public names of Ray's
        token = _raylet.AuthenticationMode.TOKEN
        found["token"] = _raylet.get_authentication_mode() == token
    asked: dict[str, Any] = {}
    for node in (each for each in ray.nodes() if each["Alive"]):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(examine).options(num_cpus=0, scheduling_strategy=there)
        name = f"{node['NodeManagerHostname']} {node['NodeID'][:6]}"
        asked[name] = task.remote(listener.getsockname()[:2])
    limit = time.monotonic() + _TASKS
    for name, ref in asked.items():
        left = max(0.0, limit - time.monotonic())
        try:
            found["nodes"][name] = ray.get(ref, timeout=min(_TASK, left))
        except Exception as error:  # noqa: BLE001  # of whatever kind Ray's are
            found["nodes"][name] = {"error": text_of(error)}
    return found


if __name__ == "__main__":
    try:
        answer = survey(sys.argv[1])
    except Exception as error:  # noqa: BLE001  # as above
        answer = {"error": text_of(error)}
    sys.stdout.write(f"{json.dumps(answer)}\n")
