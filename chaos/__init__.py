"""Chaos tests for users' own workers: faults, a history, and invariants that are checked on it.

Names are imported when they are first used: each worker of a run imports this package at its start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checker.checker import INVARIANTS, Violation
    from .config import Chaos
    from .history.events import Event
    from .history.history import History
    from .nemesis.catalog import FAULTS, TARGETS, Fault, NodeNetwork
    from .nemesis.schedule import Schedule, ScheduledFault
    from .nemesis.worker_faults import InjectedError
    from .report.html import render_page
    from .report.result import ChaosResult, FaultSummary
    from .runner import load_run, run_chaos
    from .session import Progress
    from .shrink.shrinker import Shrunk, shrink_run
    from .workload.target import Target

__all__ = [
    "FAULTS",
    "INVARIANTS",
    "TARGETS",
    "Chaos",
    "ChaosResult",
    "Event",
    "Fault",
    "FaultSummary",
    "History",
    "InjectedError",
    "NodeNetwork",
    "Progress",
    "Schedule",
    "ScheduledFault",
    "Shrunk",
    "Target",
    "Violation",
    "load_run",
    "render_page",
    "run_chaos",
    "shrink_run",
]

_SUBMODULES = (
    *("nemesis.catalog", "nemesis.schedule", "nemesis.worker_faults", "config"),
    *("history.history", "history.events", "checker.checker"),
    *("report.result", "report.html", "workload.target", "session", "runner"),
    "shrink.shrinker",
)


def __getattr__(name: str) -> Any:
    for submodule in _SUBMODULES if name in __all__ else ():
        module = import_module(f".{submodule}", __name__)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
