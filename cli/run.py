"""``phalanx run``: an example by its short name, or a function as ``module:function``.

Guarantees: what runs has this process to itself: an example is what ``python examples/NAME.py``
is; a function is called with the words after it, as strings, and the current folder can be
imported from. Its exit code is ours.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    parser.add_argument("target", metavar="EXAMPLE|module:function")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="handed on as is")


def run(arguments: argparse.Namespace) -> int:
    """Run the target; return its exit code."""
    target, words = arguments.target, arguments.words
    if ":" in target:
        return call(target, words)
    path = examples().get(target.removesuffix(".py"))
    if path is None:
        named = ", ".join(examples()) or "none here: they come with the source, not the package"
        raise SpecError("target", target, f"not an example ({named}) and not module:function")
    return _become([sys.executable, str(path), *words])


def _become(command: list[str]) -> NoReturn:
    # In place of this process: the example is then __main__, alone with its signals.
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606  # no shell is meant


def examples() -> dict[str, Path]:
    """Return the examples by name: those of the source tree, else of the current folder."""
    for root in (Path(__file__).resolve().parents[1], Path.cwd()):
        found = {path.stem: path for path in sorted(root.glob("examples/*.py"))}
        if found:
            return found
    return {}


def call(target: str, words: Sequence[str]) -> int:
    """Call ``module:function`` with *words*; return an int it returns, print anything else.

    Raises:
        SpecError: There is no such function, or it does not take so many words.
    """
    function = find(target)
    try:
        inspect.signature(function).bind(*words)
    except TypeError as error:
        given = " ".join(words) or "no words"
        raise SpecError("target", target, f"cannot be called with {given}: {error}") from error
    except ValueError:
        pass  # written in C, and does not say what it takes
    result = function(*words)
    if result is None or (isinstance(result, int) and not isinstance(result, bool)):
        return int(result or 0)
    print(result)
    return 0


def find(target: str) -> Callable[..., Any]:
    """Return the function called *target*."""
    name, _, path = target.partition(":")
    if not name or not path:
        raise SpecError("target", target, "write it as module:function")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that the user's own module misses is told in full, with its traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        where = "looked in the current folder and in what is installed"
        raise SpecError("target", target, f"there is no module {error.name}; {where}") from error
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise SpecError("target", target, f"{name} has no {path}") from error
    if not callable(found):
        raise SpecError("target", target, f"is a {type(found).__name__}; it must be callable")
    function: Callable[..., Any] = found
    return function
