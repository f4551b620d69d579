"""The folders at the root are the packages that are installed."""

from __future__ import annotations

import json
import re
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from tests.support.programs import run_program

from phalanx.runtime import encode

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
VERSIONS = (ROOT / "docs/reference/versions.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = ("actors", "supervision", "runtime", "cluster", "chaos", "cli", "testing", "integrations")

WITHOUT_TORCH = """
import json, os, signal, subprocess, sys
from importlib.util import find_spec
from pathlib import Path

from phalanx import Executor, WorkerActor, errors, method
from phalanx.runtime import Frame, decode

# A popular package is called supervision: it may well be installed, and is not looked for.
FOLDERS = ["actors", "runtime", "cluster", "chaos", "cli", "testing", "integrations"]

class Adder(WorkerActor):
    @method(idempotent=True)
    def add(self, value, dies=False):
        if dies and self.ctx.rank == 1 and self.ctx.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.ctx.rank + value

    def join(self):
        self.ctx.init_process_group("gloo")

    def bare(self):
        return [name for name in FOLDERS if find_spec(name)]

def error_of(call):
    try:
        call()
    except errors.MissingPackage as error:
        return [type(error).__name__, error.package, error.extra, str(error)]

def phalanx(*words):
    done = subprocess.run([sys.executable, "-m", "phalanx", *words], capture_output=True, text=True)
    return [done.returncode, done.stdout, done.stderr]

if __name__ == "__main__":
    with Executor(Adder, 2, name="bare", devices="cpu", limits={"start": 60}) as group:
        pid = str(os.getpid())
        seen = {
            "torch": find_spec("torch") is not None,
            "first": group.collective_rpc("add", args=(1,), timeout=60),
            "killed": group.collective_rpc("add", args=(2, True), timeout=60),
            "restarts": group.status().restarts,
            "bare": [name for name in FOLDERS if find_spec(name)],
            "bare in worker": group.call("bare", rank=0, timeout=60),
            "joined": error_of(lambda: group.collective_rpc("join", timeout=60)),
            "top": phalanx("top", "--json", pid),
            "health": phalanx("health", pid),
        }
    tensor = Path("tensor").read_bytes()
    seen["tensor"] = error_of(lambda: decode(tensor))
    seen["reply"] = error_of(Frame(0, 0, 0, 0, 0, 0, tensor).value)
    seen["training"] = error_of(lambda: __import__("phalanx.integrations.torch"))
    Path("script.py").write_text("")
    seen["torchrun"] = phalanx("torchrun", "script.py")
    seen["doctor"] = phalanx("doctor", "--json")
    print(json.dumps(seen))
"""


def bare_python(folder: Path) -> Path:
    """Make an environment of phalanx and its declared dependencies; return its interpreter."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    wanted = ["phalanx"]
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = distribution(requirement.name)
            for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                if not (packages / name).exists():
                    (packages / name).symlink_to(Path(str(found.locate_file(name))))
            is_own = requirement.name == "phalanx"
            wanted += PYPROJECT["project"]["dependencies"] if is_own else found.requires or ()
    return folder / "bin/python"


def test_without_torch_all_works_that_needs_no_tensor_and_the_rest_names_the_extra(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_TORCH)
    (tmp_path / "tensor").write_bytes(encode(torch.ones(3), "a tensor").body)

    done = run_program([str(bare_python(tmp_path / "bare")), str(program)], cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert not seen["torch"]
    assert seen["bare"] == seen["bare in worker"] == []  # names of our folders
    assert (seen["first"], seen["killed"], seen["restarts"]) == ([1, 2], [2, 3], 1)
    text = "torch is not installed: pip install 'phalanx[torch]'"
    for what in ("joined", "tensor", "reply", "training"):
        assert seen[what] == ["MissingPackage", "torch", "torch", text], what
    assert seen["torchrun"] == [1, "", f"phalanx torchrun: {text}\n"]
    assert json.loads(seen["top"][1])["groups"][0]["group"] == "bare"
    assert seen["health"][0] == 0, seen["health"]
    found = {each["name"]: each for each in json.loads(seen["doctor"][1])["findings"]}
    assert seen["doctor"][0] == 0, found
    assert (found["torch"]["state"], found["start"]["state"]) == ("note", "ok")


def test_the_changelog_begins_with_the_version_and_has_its_sections_in_order() -> None:
    version = PYPROJECT["project"]["version"]
    headings = re.findall(r"^## \[(\S+)\] - (\S+)$", CHANGELOG, re.MULTILINE)
    entry = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1]
    sections = re.findall(r"^### (.*)$", entry, re.MULTILINE)

    assert headings[0][0] == version
    order = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    assert sections == [name for name in order if name in sections]


def test_the_pythons_and_the_lowest_torch_that_are_claimed_are_those_that_were_run() -> None:
    run = re.findall(r"^\| (3\.\d+)\.\d+ .*?\| (\d+\.\d+)\.\d+", VERSIONS, re.MULTILINE)
    begins = "Programming Language :: Python :: "
    classifiers = PYPROJECT["project"]["classifiers"]
    claimed = {each.removeprefix(begins) for each in classifiers if each.startswith(begins)}
    extra = PYPROJECT["project"]["optional-dependencies"]["torch"]
    [torch_range] = [each for each in extra if each.startswith("torch")]

    assert claimed == {python for python, _ in run}
    assert torch_range == f"torch>={min((each for _, each in run), key=Version)}"


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
