"""Greeting: what a node says of itself, and why it may not serve."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from phalanx.runtime import find_gpus

from .messages import Greeting


def greeting_of(place: str, address: str) -> Greeting:
    """Return the greeting of this process, which serves at *place*."""
    inventory = find_gpus()
    try:
        devices = tuple(gpu.uuid for gpu in inventory.gpus())
    finally:
        inventory.close()
    return Greeting(
        phalanx=_version("phalanx"),
        python=platform.python_version(),
        torch=_version("torch"),
        kernel=os.uname().release,
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        place=place,
        host=socket.gethostname(),
        address=address,
        devices=devices,
    )


def why_unfit(greeting: Greeting) -> str:
    """Return why a node that says *greeting* cannot serve this driver; empty if it can.

    What one side pickles the other must unpickle: Python's minor version, phalanx and torch are to
    be the same on both.
    """
    for name, there, here in (
        ("Python", _minor(greeting.python), _minor(platform.python_version())),
        ("phalanx", greeting.phalanx, _version("phalanx")),
        ("torch", greeting.torch, _version("torch")),
    ):
        if there != here:
            return (
                f"{greeting.host} has {name} {there or '(none)'}, and the driver {here or '(none)'}"
                ": install the same version on both"
            )
    return ""


def _minor(python: str) -> str:
    return ".".join(python.split(".")[:2])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
