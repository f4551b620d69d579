"""``python -m tests.conformance [--driver core|processes] FILE...``: are the traces equal?

Prints ``N of M traces equal`` last, before it a diff for the first differences. Exit code 1 unless
all are equal.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from pprint import pformat

from .core import run_scenario
from .scenario import Json


def load(path: Path) -> list[Json]:
    """Return the lines of a vector file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def main(arguments: list[str] | None = None) -> int:
    """Run the vectors named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--driver", choices=("core", "processes"), default="core")
    parser.add_argument("--diffs", type=int, default=3, help="differences shown in full")
    options = parser.parse_args(arguments)
    vectors = [vector for path in options.files for vector in load(path)]
    if options.driver == "core":
        return report(vectors, [run_scenario(v["scenario"]) for v in vectors], options.diffs)
    from .processes import ProcessWorld
    from .shell_processes import ShellProcesses  # the core driver starts nothing

    with ShellProcesses() as shells:
        traces = [ProcessWorld(vector["scenario"], shells).run() for vector in vectors]
    return report(vectors, traces, options.diffs)


def report(vectors: list[Json], traces: list[Json], diffs: int) -> int:
    """Print how *traces* compare with those of *vectors*; return the exit code."""
    different = [
        (vector, trace)
        for vector, trace in zip(vectors, traces, strict=True)
        if vector["trace"] != trace
    ]
    for vector, trace in different[:diffs]:
        print(difference(vector, trace))
    for vector, _ in different[diffs:]:
        print(f"also different: {vector['scenario']['id']}")
    print(f"{len(vectors) - len(different)} of {len(vectors)} traces equal")
    return 1 if different or not vectors else 0


def difference(vector: Json, trace: Json) -> str:
    """Return where *trace* departs from the recorded one, with the steps that led to it."""
    scenario = vector["scenario"]
    shown = [
        pformat({**each, "steps": list(zip(scenario["steps"], each["steps"], strict=False))})
        for each in (vector["trace"], trace)
    ]
    otp, ours = (text.splitlines() for text in shown)
    diff = difflib.unified_diff(otp, ours, "OTP", "phalanx", lineterm="", n=6)
    return "\n".join([f"--- {scenario['id']} ({scenario['kind']})", *diff])


if __name__ == "__main__":
    sys.exit(main())
