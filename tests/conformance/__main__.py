"""``python -m tests.conformance [--driver core|processes] FILE...``: are the traces equal?

Prints ``N of M traces equal`` last, before it a diff for the first differences, and which
scenarios were left out, with the reason. Exit code 1 unless all that ran are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from .core import run_scenario
from .diff import difference
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
    from .processes import ProcessDriver, why_not  # the core driver starts nothing

    left_out = [why_not(vector["scenario"]) for vector in vectors]
    for reason, count in sorted(Counter(filter(None, left_out)).items()):
        print(f"left out: {count}: {reason}")
    chosen = [vector for vector, why in zip(vectors, left_out, strict=True) if not why]
    with ProcessDriver() as driver:
        return report(chosen, [driver.run(v["scenario"]) for v in chosen], options.diffs)


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


if __name__ == "__main__":
    sys.exit(main())
