"""Contestants of ``python -m benchmarks rpc``, and whether they are installed.

Guarantees: every contestant has an entry; an absent one is named, with the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .venvs import absent_without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .venvs import Environments

OURS = "phalanx"
COPY = "memcpy"


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant.

    Attributes:
        name: What it is called in tables and on the command line.
        module: What drives it.
        variant: The setting in which it is measured.
        environment: The peer whose environment it needs; None runs in ours.
        about: One line for the reader of a table.
        may_be_stopped: Whether it survives that all its processes are stopped for a while.
        on_demand: Whether it takes part only where it is asked for.
    """

    name: str
    module: str
    about: str
    variant: str = ""
    environment: str | None = None
    may_be_stopped: bool = True
    on_demand: bool = False


ENTRIES = (
    Entry(OURS, "phalanx", "this project: Executor.collective_rpc, default settings"),
    Entry("phalanx-tcp", "phalanx", 'the same, transport="zmq"', "tcp", on_demand=True),
    Entry("phalanx-ipc", "phalanx", "the same, transport=Zmq(ipc=True)", "ipc", on_demand=True),
    Entry(
        "phalanx-before",
        "phalanx",
        "another installation of phalanx, which --peer-env phalanx=PATH names",
        environment="phalanx",
        on_demand=True,
    ),
    Entry(COPY, "memcpy", "one copy of the same bytes between two warm buffers of a process"),
    Entry("pyzmq", "pyzmq", "ROUTER and DEALERs over ipc, with pickle"),
    Entry("pipe", "pipe", "one multiprocessing.Pipe for each rank"),
    Entry("pykka", "pykka", "actors that are threads of one process; nothing is copied"),
    Entry("ray", "ray", "Ray actors, large arguments by ray.put", environment="ray"),
    Entry("xoscar", "xoscar", "xoscar actors, one in each process of a pool", environment="xoscar"),
    Entry(
        "monarch",
        "monarch",
        "torchmonarch: one call to a mesh",
        environment="monarch",
        may_be_stopped=False,  # when it goes on it finds its heartbeats late, and gives up
    ),
    Entry("vllm", "vllm", "vLLM's MessageQueue, as its executor uses it", environment="vllm"),
    Entry(
        "vllm-direct",
        "vllm",
        "the same without asynchronous scheduling: no thread behind each worker's loop",
        "direct",
        "vllm",
    ),
    Entry(
        "vllm-arena",
        "vllm",
        "the same with its shared-memory arena for tensors, off by default",
        "arena",
        "vllm",
    ),
)

FOREIGN = [entry.name for entry in ENTRIES if entry.environment is not None]
TRANSPORTS = ("phalanx-tcp", "phalanx-ipc")


@dataclass(frozen=True, slots=True)
class Present:
    """A contestant that can be started with *python*."""

    entry: Entry
    python: str


def choose(
    only: Sequence[str] | None,
    peers: Sequence[str],
    environments: Environments,
    more: Sequence[str] = (),
) -> tuple[list[Present], dict[str, str]]:
    """Return the contestants, and for each absent one the reason.

    Args:
        only: Names to choose from; None for all that are measured by default.
        peers: Those with separate environments: names, ``all`` or ``none``.
        environments: Where those are.
        more: Additional names.
    """
    present: list[Present] = []
    absent: dict[str, str] = {}
    for entry in ENTRIES:
        wanted = not entry.on_demand if only is None else entry.name in only
        if not wanted and entry.name not in (OURS, *more):
            continue
        if entry.name in FOREIGN and "all" not in peers and entry.name not in peers:
            continue
        if (python := environments.python(entry.environment)) is not None:
            present.append(Present(entry, python))
        else:
            absent[entry.name] = absent_without(entry.environment)
    return present, absent
