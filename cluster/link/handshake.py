"""Greeting: the versions and properties that a node reports, and the reasons to refuse it."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.supervision import installed_version

from .messages import Greeting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def greeting_of(place: str, address: str) -> Greeting:
    """Return the greeting of this process, which serves at *place*."""
    return Greeting(
        phalanx=installed_version("phalanx"),
        python=platform.python_version(),
        torch=installed_version("torch"),
        kernel=os.uname().release,
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        place=place,
        host=socket.gethostname(),
        address=address,
    )


def why_unfit(greeting: Greeting) -> str:
    """Return why a node that says *greeting* cannot serve this driver; empty if it can."""
    here = {"python": platform.python_version()}
    here |= {package: installed_version(package) for package in ("phalanx", "torch")}
    for name, there, own in version_mismatches(
        {name: getattr(greeting, name) for name in here}, here
    ):
        why = f"{greeting.host} has {name} {there}, and the driver {own}"
        return f"{why}: install the same version on both"
    return ""


def version_mismatches(
    there: Mapping[str, str | None], here: Mapping[str, str | None]
) -> Iterator[tuple[str, str, str]]:
    """Yield what is to have the same version on both sides and has not, with the two versions.

    Each side must unpickle the other's values: Python's minor version, phalanx and torch.
    """
    for name in ("Python", "phalanx", "torch"):
        found, wanted = (side.get(name.lower()) or "(none)" for side in (there, here))
        if name == "Python":
            found, wanted = (".".join(each.split(".")[:2]) for each in (found, wanted))
        if found != wanted:
            yield name, found, wanted
