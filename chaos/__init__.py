"""Faults for users' own workers, and proof that they lost nothing by them.

Names are imported when they are first used: each worker of a run imports this folder when it is
started, and must not pay for what only the driver needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checker import RULES, check
    from .faults import FAULTS, TARGETS, Aim, Fault
    from .history import CallHistory, History
    from .journal import Journal, read_history
    from .orders import InjectedError
    from .page import render_page
    from .plan import Chaos
    from .record import Record
    from .records import record_of
    from .result import ChaosResult, FaultSummary
    from .run_record import load_plan, load_run
    from .runner import run_chaos
    from .schedule import Schedule, Strike
    from .session import Progress
    from .shrinker import Replays, Shrunk, shrink_run
    from .target import Target, find_examples
    from .violation import INVARIANTS, Violation

__all__ = [
    "FAULTS",
    "INVARIANTS",
    "RULES",
    "TARGETS",
    "Aim",
    "CallHistory",
    "Chaos",
    "ChaosResult",
    "Fault",
    "FaultSummary",
    "History",
    "InjectedError",
    "Journal",
    "Progress",
    "Record",
    "Replays",
    "Schedule",
    "Shrunk",
    "Strike",
    "Target",
    "Violation",
    "check",
    "find_examples",
    "load_plan",
    "load_run",
    "read_history",
    "record_of",
    "render_page",
    "run_chaos",
    "shrink_run",
]

_HOMES = {
    "checker": ("RULES", "check"),
    "faults": ("FAULTS", "TARGETS", "Aim", "Fault"),
    "history": ("CallHistory", "History"),
    "journal": ("Journal", "read_history"),
    "orders": ("InjectedError",),
    "page": ("render_page",),
    "plan": ("Chaos",),
    "record": ("Record",),
    "records": ("record_of",),
    "result": ("ChaosResult", "FaultSummary"),
    "run_record": ("load_plan", "load_run"),
    "runner": ("run_chaos",),
    "schedule": ("Schedule", "Strike"),
    "session": ("Progress",),
    "shrinker": ("Replays", "Shrunk", "shrink_run"),
    "target": ("Target", "find_examples"),
    "violation": ("INVARIANTS", "Violation"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
