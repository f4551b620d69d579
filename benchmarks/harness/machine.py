"""What a run was made on, without names of machines and without dates."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Return the properties of this machine that matter for a comparison of figures."""
    return {
        "cpu": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "virtual": b"hypervisor" in _read("/proc/cpuinfo"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "phalanx": installed_version("phalanx"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def sentence(machine: dict[str, Any]) -> str:
    """Return it as one line of text."""
    kind = "virtual machine" if machine["virtual"] else "machine"
    return (
        f"{machine['cpus']} processors ({machine['cpu']}, {kind}), {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, Python {machine['python']}, torch {machine['torch']}; "
        f"load before the run {machine['load_before']}"
    )


def _processor() -> str:
    match = re.search(rb"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match.group(1).decode() if match else platform.machine()


def installed_version(name: str) -> str | None:
    """Return the version of the package *name*; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
