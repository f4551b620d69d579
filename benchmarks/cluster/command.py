"""``python -m benchmarks cluster``: groups on several machines, held against their targets.

Guarantees: a part that breaks is a row that says so, and the others go on; a run leaves nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.arguments import (
    add_json,
    add_peer_env,
    check_writable,
    count,
    give,
    one_of,
    several,
)
from benchmarks.harness.machine import describe
from benchmarks.harness.process_group import MARK, Family, command
from benchmarks.harness.subprocess_driver import link_package
from benchmarks.harness.venvs import Environments
from phalanx import Runtime

from . import parts, peers
from .machines import Machines
from .table import Found, text, values

if TYPE_CHECKING:
    import argparse

_MACHINES = 4  # two with ranks, a spare, and one in place of a lost one
_PARTS = {
    "rank": parts.rank,
    "node": parts.node,
    "silence": parts.silence,
    "cuts": parts.cuts,
    "driver": parts.driver,
    "eight": parts.eight,
    "accounts": parts.accounts,
    "calls": parts.calls,
    "start": parts.start,
    "ray-actors": peers.ray_actors,
    "torchrun": peers.torchrun,
    "ray": parts.ray,  # last: the environment of this process is that of the Ray from then on
}
_GOING = 10.0  # seconds for processes that are on their way out at the end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--rounds", type=count, default=30, help="default 30; fewer if slow")
    parser.add_argument(
        "--cuts", type=count, default=100, help="short ones; twice as many for ever"
    )
    parser.add_argument("--calls", type=count, default=10_000, help="that are accounted for")
    known = several(one_of(_PARTS))
    parser.add_argument("--only", type=known, default=[], metavar=",".join(_PARTS))
    parser.add_argument(
        "--peers", action="store_true", help="Ray actors, Monarch, torchrun as well"
    )
    add_peer_env(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; with Ctrl-C, what there was by then."""
    check_writable("json", arguments.json)
    environments = Environments(arguments.peer_env)
    found, code = Found(describe()), 0
    mark = os.environ[MARK] = uuid.uuid4().hex  # by which what is left is found
    try:
        machines = Machines(_MACHINES)  # before any thread: one that is there stays outside
        found.about = machines.about
        with (
            tempfile.TemporaryDirectory(prefix="ph", ignore_cleanup_errors=True) as place,
            Runtime(console=None, stream=False) as runtime,
        ):
            link_package(Path(place))
            lab = parts.Lab(
                machines,
                found,
                runtime,
                Path(place),
                environments if arguments.peers else None,
                arguments.rounds,
                arguments.cuts,
                arguments.calls,
            )
            for name in [each for each in _PARTS if each in arguments.only or not arguments.only]:
                try:
                    _PARTS[name](lab)
                except Exception as error:  # noqa: BLE001  # the other parts go on
                    traceback.print_exc()
                    found.why[name] = f"broke: {type(error).__name__}: {error}"[:200]
    except KeyboardInterrupt:
        print("\nended by Ctrl-C; this is what there was", file=sys.stderr)
        code = 130
    finally:
        found.left = _sweep(mark)
    give(arguments, values(found), text(found))
    return code


def _sweep(mark: str) -> list[str]:
    """End what is left of the run; return the commands of it."""
    family, deadline = Family(os.getpid(), mark), time.monotonic() + _GOING
    while family.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [command(pid) for pid in family.pids()]
    family.end()
    return left
