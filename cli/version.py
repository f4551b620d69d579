"""``phalanx version``: what is installed.

Guarantees: nothing is imported to find out.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

_PACKAGES = ("phalanx", "torch", "pykka", "pyzmq", "structlog", "cloudpickle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the versions."""
    found = installed()
    if arguments.json:
        print(json.dumps(found))
        return 0
    for name, number in found.items():
        print(f"{name} {number or 'is not installed'}")
    return 0


def installed() -> dict[str, str | None]:
    """Return the version of each package, None where it is missing, and of Python."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found | {"python": platform.python_version()}
