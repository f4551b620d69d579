"""What became of a call, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class OutcomeKind(StrEnum):
    """The class of an outcome."""

    OK = "ok"
    ERROR = "error"
    DEAD = "dead"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's part of a `gather`.

    Attributes:
        value: What the rank returned; None unless `ok`.
        error: What it raised, or `WorkerDied`, or `CallTimeout`; None where `ok`.
    """

    rank: int
    kind: OutcomeKind
    value: Any = None
    error: BaseException | None = None

    @property
    def ok(self) -> bool:
        """Whether the rank answered with a value."""
        return self.kind is OutcomeKind.OK

    def get(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value
