"""Test support: a pytest plug-in, a leak detector, fake GPUs and ranks without a process.

Importing it, or having pytest load it by its entry point, imports nothing else of phalanx; each
name below is imported when it is first used. The plug-in: docs/reference/chaos.md.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from .fakes import FakeGpus
    from .leaks import Leak, LeakDetector, LeakScope
    from .plugin import ChaosRuns
else:

    def __getattr__(name: str) -> object:
        """Import the public name *name*."""
        from importlib import import_module  # noqa: PLC0415  # no name of this module

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        submodule = {"ChaosRuns": "plugin", "FakeGpus": "fakes"}.get(name, "leaks")
        return getattr(import_module(f"{__name__}.{submodule}"), name)


__all__ = ["ChaosRuns", "FakeGpus", "Leak", "LeakDetector", "LeakScope"]

pytest_plugins = ("phalanx.testing.plugin",)
