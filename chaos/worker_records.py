"""What workers themselves tell: what they really ran.

Guarantees: frozen values, each one line of JSON (`record`).

Left to others: writing it down before it can be lost (`witness`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Woke(Record):
    """A worker was about to run ``on_start``, or ``on_reform`` where *kept*.

    Attributes:
        rendezvous: Where this epoch meets; empty where it does not.
        outlived: Processes of earlier incarnations of this rank that were still there.
    """

    kind: ClassVar[str] = "woke"
    group: str
    rank: int
    incarnation: int
    epoch: int
    pid: int
    rendezvous: str = ""
    kept: bool = False
    outlived: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Began(Record):
    """A worker began to run a call: its effect.

    Attributes:
        turn: How many this incarnation has begun, with it.
        descriptors: How many it had open; 0 where that was not looked at.
    """

    kind: ClassVar[str] = "began"
    group: str
    rank: int
    incarnation: int
    epoch: int
    call: int
    wire: int
    turn: int
    descriptors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Record):
    """A worker had run a call, and was about to answer.

    Attributes:
        error: The type of what it raised; empty for a value.
        joined: Whether it raised that in a process group with others.
    """

    kind: ClassVar[str] = "ended"
    group: str
    rank: int
    incarnation: int
    epoch: int
    call: int
    wire: int
    error: str = ""
    joined: bool = False
