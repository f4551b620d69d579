"""Arguments that several measurements take, and where their figures go.

Guarantees: an output that cannot be written is reported before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LONGEST = 1e9  # seconds, thirty years; Python's locks can wait for ten times that
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "KIB": 1 << 10, "M": 1 << 20, "MIB": 1 << 20}


def add_json(parser: argparse.ArgumentParser) -> None:
    """Take ``--json``."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the figures to FILE; without one, or with -, print them instead of tables",
    )


def add_peer_env(parser: argparse.ArgumentParser) -> None:
    """Take ``--peer-env``."""
    parser.add_argument(
        "--peer-env",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="where a peer is installed; else $PHALANX_BENCH_ENVS or ~/.cache/phalanx/peers",
    )


def check_writable(option: str, path: str | None) -> None:
    """Raise where *path* cannot be written.

    Raises:
        SpecError: naming *option*.
    """
    if path is None or path == "-":
        return
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise SpecError(option, path, "its folder does not exist: make it first")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise SpecError(option, path, "cannot be written: name another file")


def give(arguments: argparse.Namespace, values: dict[str, Any], text: str) -> None:
    """Print *text*, and write *values* where they were asked for."""
    if arguments.json == "-":
        print(json.dumps(values, indent=2))
        return
    try:
        print(text, flush=True)
    finally:  # also if nothing reads the text any longer
        if arguments.json is not None:
            Path(arguments.json).write_text(json.dumps(values, indent=2) + "\n")


def several(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return what reads values with commas between them, each value once."""

    def read(text: str) -> list[Any]:
        if not (found := list(dict.fromkeys(convert(word) for word in text.split(",") if word))):
            message = "name at least one"
            raise argparse.ArgumentTypeError(message)
        return found

    read.__name__ = "list"  # how argparse calls what it could not read
    return read


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return what reads a name that is *known*."""
    names = tuple(known)

    def read(text: str) -> str:
        if text not in names:
            message = f"{text!r}: there is no such one; there are {', '.join(names)}"
            raise argparse.ArgumentTypeError(message)
        return text

    return read


def size(text: str) -> int:
    """Read a number of bytes: ``0``, ``64K``, ``8MiB``."""
    digits = text.strip().rstrip("KkMmIiBb")
    unit = _UNITS.get(text.strip()[len(digits) :].upper())
    if unit is None or not digits.isdigit():
        message = f"{text!r} is no size: write 0, 64K or 8M"
        raise argparse.ArgumentTypeError(message)
    return int(digits) * unit


def count(text: str) -> int:
    """Read a number of things, of which there is at least one."""
    if not text.isdigit() or int(text) < 1:
        message = f"{text!r} must be a whole number, at least 1"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def span(text: str) -> float:
    """Read a number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LONGEST:
        message = f"{text!r} must be a number of seconds, from 0 to {_LONGEST:g}"
        raise argparse.ArgumentTypeError(message)
    return value
