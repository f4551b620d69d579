"""Embed text with every layer split over the ranks of two machines, one of which is lost meanwhile.

The machines are nodes of a Ray cluster that this program starts. Ray finds a machine and starts
one process there; calls and their answers do not go through it. When a machine is lost its ranks
are started on another, once it is certain that the old ones have ended, and the calls in flight are
sent again.

    python examples/cluster_ray.py --ranks 4 --kills 1     (needs phalanx[ray])
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minilm import HEADS, QUESTION, WIDTH, batches, is_right, passages
from phalanx import Executor, Intensity, Launch, Ray
from phalanx.events import GroupUp, NodeFenced, NodeLost
from tensor_parallel import Shard

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

HERE = str(Path(__file__).parent)
STORE = 80 << 20  # bytes of Ray's object store on each machine; phalanx puts nothing into it


class Machines:
    """A Ray of several machines, in a process beside this one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    def exchange(self, old: str, new: str) -> None:
        """Lose the machine *old* without a word, and have another, as an autoscaler would."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([old, new]) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ray: "):
                return line.removeprefix("ray: ").strip()
        raise SystemExit("Ray did not start: its messages are above")


@contextlib.contextmanager
def machines(names: Sequence[str]) -> Generator[Machines]:
    """Run a Ray with machines of these *names* for as long as the block."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # short
        words = [sys.executable, __file__, "--serve-ray", folder, *names]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
            yield Machines(process)
            assert process.stdin is not None
            process.stdin.close()  # it ends with its input


def serve_ray(folder: str, names: Sequence[str]) -> None:
    """Be that process."""
    os.environ |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}
    test_clusters: Any = import_module("ray.cluster_utils")  # the driver is to be without Ray
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
    cluster = test_clusters.Cluster(initialize_head=True, head_node_args=head)
    there = {name: cluster.add_node(num_cpus=2, object_store_memory=STORE) for name in names}
    print(f"ray: {cluster.address}", flush=True)
    for line in sys.stdin:
        old, new = json.loads(line)
        cluster.remove_node(there.pop(old), allow_graceful=False)
        there[new] = cluster.add_node(num_cpus=2, object_store_memory=STORE)
        print("ray: done", flush=True)
    cluster.shutdown()


def main(words: Sequence[str] | None = None) -> int:
    """Embed the dataset; return 0 if every embedding equals that of one process."""
    parser = argparse.ArgumentParser(description="Embed on two machines, and lose one.")
    parser.add_argument("--ranks", type=int, default=4, help="worker processes, half on each")
    parser.add_argument("--kills", type=int, help="machines that are lost at work; else 1")
    parser.add_argument("--passages", type=int, default=500, help="passages, 32 to a call")
    parser.add_argument("--serve-ray", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.serve_ray:
        serve_ray(options.serve_ray[0], options.serve_ray[1:])
        return 0
    kills = ("kills", 0, min(9, options.passages // 32))  # one between two calls
    if options.kills is None:
        options.kills = min(1, kills[2])
    for name, least, most in (("ranks", 1, HEADS), ("passages", 1, 2500), kills):
        if not least <= (value := getattr(options, name)) <= most:
            parser.error(f"--{name} {value}: give {least} to {most}")
    if find_spec("ray") is None:
        parser.error("Ray is missing: pip install 'phalanx[ray]'")
    texts = [*passages(options.passages), QUESTION]
    work, vectors = batches(texts), torch.zeros(len(texts), WIDTH)
    kill_at = {(i + 1) * len(work) // (options.kills + 1): f"m{i}" for i in range(options.kills)}
    told: list[Any] = []
    with machines(["m0", "m1"]) as ray:
        cluster = Ray(
            address=ray.address,
            ranks_per_node=-(-options.ranks // 2),
            node_timeout=5.0,
            # The code is on each machine; {"working_dir": HERE} would send it.
            runtime_env={"env_vars": {"PYTHONPATH": HERE}},
        )
        with Executor(
            Shard,
            options.ranks,
            cluster=cluster,
            devices="cpu",
            intensity=Intensity(options.kills, 600.0),
            launch=Launch(preload=("torch",)),
        ) as group:
            group.subscribe(told.append)
            print(*(f"node {each.node}: ranks {each.ranks}" for each in group.status().nodes))
            for number, (rows, ids) in enumerate(work):
                call: Any = group.collective_rpc(
                    "embed", args=(ids,), unique_reply_rank=0, non_block=True, retries=options.kills
                )
                if number in kill_at:
                    ray.exchange(kill_at[number], f"m{number + 2}")
                    print(f"lost machine {kill_at[number]}")
                vectors[rows] = call.result()
            status = group.status()
    for event in told:
        if isinstance(event, NodeLost | NodeFenced):
            print(f"node {event.node}: {event.event.removeprefix('phalanx.node_')} ({event.why})")
        elif isinstance(event, GroupUp):
            print(f"all ranks were up again after {event.took:.1f} s")
    print(f"{len(work)} calls answered; restarts: {status.restarts}")
    return 0 if is_right(texts, vectors) else 1


if __name__ == "__main__":
    sys.exit(main())
