"""Faults for users' own workers, and proof that they lost nothing by them."""

from __future__ import annotations

from .checker import RULES, check
from .history import CallHistory, History
from .journal import Journal, read_history
from .records import Record, record_of
from .violation import INVARIANTS, Violation

__all__ = [
    "INVARIANTS",
    "RULES",
    "CallHistory",
    "History",
    "Journal",
    "Record",
    "Violation",
    "check",
    "read_history",
    "record_of",
]
