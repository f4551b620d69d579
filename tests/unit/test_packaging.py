"""The folders at the root are the packages that are installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = (
    *("actors", "supervision", "runtime", "chaos", "cli", "testing"),
    "integrations",
)

BARE_NAMES = """
from importlib.util import find_spec

from phalanx import Executor, WorkerActor

class Looker(WorkerActor):
    def look(self, names):
        return [name for name in names if find_spec(name)]

if __name__ == "__main__":
    names = ["actors", "runtime", "chaos", "cli", "testing", "integrations"]
    found = [name for name in names if find_spec(name)]
    with Executor(Looker, launch={'preload': ()}) as group:
        print(found, group.collective_rpc("look", args=(names,), unique_reply_rank=0, timeout=60))
"""


def test_every_package_is_listed() -> None:
    on_disk = {
        "phalanx." + ".".join(init.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }

    assert set(SETUPTOOLS["packages"]) == on_disk | {"phalanx"}


def test_links_name_the_same_folders_as_the_mapping() -> None:
    for package, folder in SETUPTOOLS["package-dir"].items():
        link = ROOT.joinpath("src", *package.split(".")) if package else ROOT / "src"

        assert link.resolve() == (ROOT / folder).resolve()


def test_the_folders_bare_names_are_not_importable_in_driver_or_worker(tmp_path: Path) -> None:
    # A popular package is called supervision: it may well be installed, and is not looked for.
    program = tmp_path / "program.py"
    program.write_text(BARE_NAMES)

    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )

    assert done.stdout.strip() == "[] []"
