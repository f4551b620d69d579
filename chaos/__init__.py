"""Faults for users' own workers, and proof that they lost nothing by them."""

from __future__ import annotations

from .checker import RULES, check
from .faults import FAULTS, TARGETS, Aim, Fault
from .history import CallHistory, History
from .journal import Journal, read_history
from .orders import InjectedError
from .plan import Chaos
from .records import Record, record_of
from .result import ChaosResult, FaultSummary
from .run_record import load_plan, load_run
from .runner import run_chaos
from .schedule import Schedule, Strike
from .session import Progress
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
    "Schedule",
    "Strike",
    "Target",
    "Violation",
    "check",
    "find_examples",
    "load_plan",
    "load_run",
    "read_history",
    "record_of",
    "run_chaos",
]
