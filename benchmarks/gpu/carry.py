"""``python -m benchmarks.gpu.carry FOLDER``: what a machine with a GPU and no network needs.

FOLDER gets the committed tree, wheels of the packages that phalanx needs beside torch, and
``start.sh``, which unpacks both on that machine and runs its arguments there::

    sh FOLDER/start.sh python3 -m benchmarks gpu e0 e1 e2 --out OUT

Nothing is installed into that machine's Python. It has Python 3.12, torch with CUDA, pytest,
pytest-timeout and NumPy.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MOST = 64 << 20  # bytes that can be carried
_THERE = ("torch", "numpy")  # large, and there already
_FOR = ("gpu", "chaos", "cli")  # the extras that the experiments use
_MORE = ("markupsafe", "markdown-it-py", "mdurl", "pygments")  # what jinja2 and rich need
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_START = """\
#!/bin/sh
# Made by benchmarks/gpu/carry.py. Runs its arguments with phalanx on the path.
set -e
here=$(cd "$(dirname "$0")" && pwd)
lab=${{PHALANX_LAB:-/tmp/phalanx-lab}}
if [ ! -e "$lab/ready" ]; then
  mkdir -p "$lab/tree" "$lab/site"
  tar -xf "$here/tree.tar" -C "$lab/tree"
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \\
    --target "$lab/site" "$here"/*.whl
  touch "$lab/ready"
fi
export PYTHONPATH="$lab/tree/src:$lab/tree:$lab/site" PYTHONUNBUFFERED=1 PHALANX_LAB_CODE={commit}
cd "$lab/tree"
exec "$@"
"""


def main(words: list[str] | None = None) -> int:
    """Fill the folder; return 0, or 1 if it is larger than can be carried."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.carry", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(words).folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.whl"), *folder.glob("tree.tar")):
        old.unlink()
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    only = ("--no-deps", "--only-binary=:all:", "--implementation", "cp", "--quiet")
    version = ("--python-version", "3.12", "--dest", str(folder))
    pip = [sys.executable, "-m", "pip", "download", *only, *version, *platforms]
    subprocess.run([*pip, *requirements()], check=True)
    tar = ["git", "-C", str(ROOT), "archive", "--output", str(folder.absolute() / "tree.tar")]
    subprocess.run([*tar, "HEAD"], check=True)
    head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    (folder / "start.sh").write_text(_START.format(commit=commit))
    size = sum(each.stat().st_size for each in folder.iterdir())
    print(f"{folder}: {size / (1 << 20):.1f} MiB")
    return 0 if size <= _MOST else 1


def requirements() -> list[str]:
    """Return what phalanx and the extras of the experiments need, but for what is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    found = [*project["dependencies"], *(each for name in _FOR for each in extras[name]), *_MORE]
    return [each for each in found if re.split(r"[<>=\[ ]", each)[0] not in _THERE]


if __name__ == "__main__":
    sys.exit(main())
