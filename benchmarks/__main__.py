"""``python -m benchmarks WHAT``: the measurements that there are.

Each is a module with ``add_arguments(parser)`` and ``run(arguments) -> exit code``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from phalanx.supervision import CallerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_COMMANDS = {
    "rpc": ("rpc.command", "how long a call takes, beside what a user could use instead"),
    "profile": ("rpc.profile", "how much of a call each of its steps takes"),
    "metrics": ("rpc.metrics", "what metrics for Prometheus cost a call"),
    "recovery": ("recovery", "how long a group is gone when a rank is killed"),
    "kill": ("kill.scenarios", "what becomes of calls and machines when something is killed"),
    "cluster": ("cluster.command", "how groups on several machines fare when nodes are lost"),
    "training": (
        "training.command",
        "what training through kills costs, and whether it stays exact",
    ),
    "scale": ("scale", "what a group costs by the number of its ranks"),
    "startup": ("startup", "how long ranks take to start, beside multiprocessing"),
    "supervision": ("supervision", "what supervision costs by the number of children"),
    "gpu": ("gpu.command", "experiments on a machine with a GPU"),
    "peers": ("harness.peers", "where peers are installed, and install them"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the measurement that *words* name (None: those of this process); return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (path, summary) in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary.capitalize())
        import_module(f"benchmarks.{path}").add_arguments(subparser)
    arguments = parser.parse_args(words)
    # A run has processes to end: SIGTERM is to unwind it, as Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, _leave)
    try:
        module = import_module(f"benchmarks.{_COMMANDS[arguments.what][0]}")
        code: int = module.run(arguments)
    except CallerError as error:
        print(f"benchmarks {arguments.what}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return code


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
