"""`Entry`: one call that a new worker is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Entry:
    """One call that a new worker is told.

    Attributes:
        answers: What the ranks answered, where the worker is to be told instead of asked.
    """

    method: str | bytes
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    answers: tuple[Any, ...] = ()
