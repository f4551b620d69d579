"""What a supervisor answers: OTP's results, as values.

Guarantees: every request is answered with exactly one `Answer`; a refusal is a value here, and
becomes an exception only at the surface that users call (`Supervisor`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from .spec import ChildSpec
    from .strategy import ChildType


class Refusal(StrEnum):
    """Why a request was refused, in OTP's words where OTP has one."""

    ALREADY_STARTED = "already_started"
    ALREADY_PRESENT = "already_present"
    NOT_FOUND = "not_found"
    RUNNING = "running"
    RESTARTING = "restarting"
    START_FAILED = "start_failed"
    BAD_COMBINATION = "bad_combination"
    MAX_CHILDREN = "max_children"
    SIMPLE_ONE_FOR_ONE = "simple_one_for_one"
    INVALID_SPEC = "invalid_child_spec"
    NOPROC = "noproc"


class Shown(StrEnum):
    """The state of a child as requests show it."""

    RUNNING = "running"
    RESTARTING = "restarting"
    UNDEFINED = "undefined"


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out.

    Attributes:
        child: The key of the child; empty where an ignored child was not kept.
        running: Whether the child runs now.
    """

    child: str
    running: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not carried out; *error* is what a start function raised, if it was that."""

    why: Refusal
    child: str = ""
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class ChildRow:
    """One line of `which_children`."""

    key: str
    shown: Shown
    type: ChildType


@dataclass(frozen=True, slots=True)
class Children:
    """All children, newest first."""

    rows: tuple[ChildRow, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many children there are.

    Attributes:
        specs: Known children, running or not; 1 for simple_one_for_one.
        active: Running ones.
        supervisors: Known ones that are supervisors.
        workers: Known ones that are workers.
    """

    specs: int
    active: int
    supervisors: int
    workers: int


@dataclass(frozen=True, slots=True)
class Found:
    """The spec asked for."""

    spec: ChildSpec


Answer: TypeAlias = Done | Refused | Children | Counts | Found
