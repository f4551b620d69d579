"""The program that ranks run: a script, a module or a command; found before anything starts."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Literal

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Program:
    """The program that each rank runs.

    Attributes:
        kind: ``"script"``, ``"module"`` (as of ``python -m``), or ``"command"``, which is executed.
        target: The path, the module's name, or the command's file.
        args: Its arguments; ``${local_rank}`` stands for the local rank.
        name: Its name in the summary.
    """

    kind: Literal["script", "module", "command"]
    target: str
    args: tuple[str, ...]
    name: str

    def args_of(self, local_rank: int) -> list[str]:
        """Return the arguments of one rank."""
        return [Template(each).safe_substitute(local_rank=local_rank) for each in self.args]

    @property
    def folder(self) -> str | None:
        """The first entry of ``sys.path``; None for none."""
        path = Path(self.target)
        if self.kind != "module" and (path.is_dir() or zipfile.is_zipfile(path)):
            return self.target if path.is_absolute() else f"{Path.cwd()}/{self.target}"  # as Python
        if sys.flags.safe_path:
            return None
        return str(Path.cwd() if self.kind == "module" else path.resolve().parent)


def find_program(
    target: str,
    args: Sequence[str],
    *,
    module: bool,
    no_python: bool,
    run_path: bool,
    environ: Mapping[str, str],
) -> Program:
    """Return the program that the command line names.

    Raises:
        SpecError: there is none, or the options contradict each other.
    """
    if module and (no_python or run_path):
        other = "--no-python" if no_python else "--run-path"
        raise SpecError("--module", target, f"it contradicts {other}: give one of them")
    arguments = tuple(args)
    if run_path or not no_python:
        if module:
            _check_module(target)
        elif not Path(target).exists():
            raise SpecError("training_script", target, "no such file")
        elif Path(target).is_dir() and not (Path(target) / "__main__.py").is_file():
            raise SpecError("training_script", target, "it is a folder without __main__.py")
        python = environ.get("PYTHON_EXEC", "")
        if run_path or python in {"", sys.executable}:
            name = "run_script_path" if run_path else target
            return Program("module" if module else "script", target, arguments, name)
        words = ("-u", *(["-m"] if module else []), target, *arguments)
        return Program("command", _executable("PYTHON_EXEC", python), words, python)
    return Program("command", _executable("training_script", target), arguments, target)


def _executable(field: str, name: str) -> str:
    found = shutil.which(name)
    if found is None:
        problem = "it is not executable" if Path(name).exists() else "no such program"
        raise SpecError(field, name, problem)
    return os.path.abspath(found) if os.sep in name else found  # noqa: PTH100  # keeps symlinks


def _check_module(name: str) -> None:
    """Raise unless ``python -m`` would find *name*; imports nothing."""
    where: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    known = ""
    for part in name.split("."):
        known = f"{known}.{part}" if known else part
        spec = None if where is None else PathFinder.find_spec(known, where)
        if spec is None:
            if not _has_other_finder(known):
                raise SpecError("--module", name, f"no module named {known!r}")
            return
        where = spec.submodule_search_locations
    if where is not None and PathFinder.find_spec(f"{name}.__main__", where) is None:
        raise SpecError("--module", name, "it is a package without __main__")


def _has_other_finder(name: str) -> bool:
    """Whether a finder beside those of paths (an editable install) knows *name*, if top-level."""
    if "." in name:
        return False
    others = (each for each in sys.meta_path if each is not PathFinder)
    return any(each.find_spec(name, None) is not None for each in others)
