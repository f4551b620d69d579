"""What a command line is taken for, and where figures go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.arguments import count, several

ROOT = Path(__file__).parents[3]
GIVING = """
import argparse, sys
from benchmarks.harness.arguments import give
sys.stdin.read()
give(argparse.Namespace(json=sys.argv[1]), {"found": 1}, "text")
"""


def test_what_is_named_twice_is_measured_once() -> None:
    assert several(count)("8,1,8,") == [8, 1]


def test_figures_are_written_though_nothing_reads_the_text(tmp_path: Path) -> None:
    words = [sys.executable, "-c", GIVING, str(tmp_path / "out.json")]
    reader, writer = os.pipe()
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=writer, cwd=ROOT) as giving:
        os.close(writer)
        os.close(reader)
        giving.communicate(timeout=60)

    assert giving.returncode != 0
    assert json.loads((tmp_path / "out.json").read_text()) == {"found": 1}
