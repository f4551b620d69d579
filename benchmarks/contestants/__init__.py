"""Contestants: ways to call N workers, each driven from outside through its standard input.

Guarantees: nothing here imports phalanx, but for the contestant that is phalanx, and a contestant's
own package is imported by its own module only: the folder is also run by the interpreters of other
environments, under the name ``phalanx_peers``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .protocol import Contestant

__all__ = ["MODULES", "contestant"]

MODULES = {
    "phalanx": "phalanx_group",
    "memcpy": "memcpy",
    "pyzmq": "raw_zmq",
    "pipe": "pipes",
    "pykka": "pykka_threads",
    "ray": "ray_actors",
    "ray-nodes": "ray_nodes",
    "xoscar": "xoscar_actors",
    "monarch": "monarch_mesh",
    "monarch-hosts": "monarch_hosts",
    "vllm": "vllm_queue",
    "vllm-executor": "vllm_executor",
    "torchrun": "torchrun_group",
    "torchrun-nodes": "torchrun_nodes",
}


def contestant(name: str) -> Contestant:
    """Return the contestant called *name*, not open yet."""
    made: Contestant = import_module(f".{MODULES[name]}", __name__).make()
    return made
