"""What the referee of a run tells: its drivers, the faults, and what was left behind.

Guarantees: frozen values, each one line of JSON (`record`).

Left to others: doing the faults (`striker`) and looking for what is left (`footprint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeBegan(Record):
    """A driver began; after one that was killed there is another.

    Attributes:
        life: 1 for the first.
    """

    kind: ClassVar[str] = "life_began"
    life: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeEnded(Record):
    """A driver ended.

    Attributes:
        closed: Whether it closed everything itself; what it had in flight otherwise has no outcome
            that anybody could have heard.
    """

    kind: ClassVar[str] = "life_ended"
    life: int
    closed: bool
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck(Record):
    """A fault was done to somebody.

    Attributes:
        strike: Its number in the schedule.
        point: The moment it was aimed at; empty where it was not.
        rank: The victim's; None for what is no rank.
        lethal: Whether it ends the victim by itself.
    """

    kind: ClassVar[str] = "struck"
    strike: int
    fault: str
    target: str
    point: str = ""
    group: str = ""
    rank: int | None = None
    incarnation: int | None = None
    pid: int | None = None
    lethal: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed(Record):
    """A fault found nobody to do it to."""

    kind: ClassVar[str] = "missed"
    strike: int
    fault: str
    target: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined(Record):
    """After the last fault the group was given time to heal, and every rank was called.

    Attributes:
        ok: Whether it served.
        ended: Whether it had ended for good.
    """

    kind: ClassVar[str] = "examined"
    group: str
    ok: bool
    ended: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Record):
    """Something was there after the end that was not there before the beginning.

    Attributes:
        what: ``process``, ``shared memory``, ``file``, ``descriptor``, ``thread`` or
            ``device memory``.
    """

    kind: ClassVar[str] = "left"
    what: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Complained(Record):
    """The traffic itself found something wrong: it raised what no fault explains."""

    kind: ClassVar[str] = "complained"
    error: str
    trace: str = ""

    def line(self) -> str:
        """Return it with its traceback as one."""
        first = f"{self.at:9.3f}  {self.kind:<13} {self.error}"
        return "\n".join((first, *(f"      {each}" for each in self.trace.splitlines())))
