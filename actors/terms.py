"""How a call is to be made: whom it goes to, for how long, and what a death of a rank costs it.

Guarantees: terms that make no sense cannot be had.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import Any, Literal, NamedTuple, cast

from phalanx.supervision import SpecError

OnDeath = Literal["fail", "retry"]
OnTimeout = Literal["leave", "restart"]


class Shape(Enum):
    """Whom a call goes to, and how its answers make one outcome."""

    COLLECTIVE = auto()  # every rank, as a whole
    GATHER = auto()  # every rank, each for itself
    SINGLE = auto()  # one named rank
    POOL = auto()  # any idle rank


class Terms(NamedTuple):
    """How a call is to be treated.

    Attributes:
        deadline: On the monotonic clock; None waits without limit.
        timeout: What the caller gave, for messages; None for no limit.
        retries: How often a death may send the call again.
    """

    deadline: float | None = None
    timeout: float | None = None
    on_death: OnDeath = "fail"
    retries: int = 0
    on_timeout: OnTimeout = "leave"
    tell: bool = False


_KNOWN: dict[tuple[str, int, str, bool], Terms] = {}  # those without a deadline
_MOST_KNOWN = 64


def terms_of(
    *,
    now: float,
    timeout: float | None,
    on_death: OnDeath = "fail",
    retries: int = 1,
    on_timeout: OnTimeout = "leave",
    tell: bool = False,
) -> Terms:
    """Return the terms of a call made *now*, which counts only where there is a *timeout*.

    That has been checked (`check_timeout`).

    Raises:
        SpecError: a negative number of retries, or an unknown policy.
    """
    if timeout == math.inf:
        timeout = None
    key = (on_death, retries, on_timeout, tell)
    if timeout is None and type(retries) is int:
        known = _KNOWN.get(key)
        if known is not None:
            return known
    if on_death not in ("fail", "retry"):
        raise SpecError("on_death", on_death, 'give "fail" or "retry"')
    if on_timeout not in ("leave", "restart"):
        raise SpecError("on_timeout", on_timeout, 'give "leave" or "restart"')
    _check_retries(retries)
    if timeout is not None:
        return Terms(now + timeout, timeout, on_death, retries, on_timeout, tell)
    terms = Terms(None, None, on_death, retries, on_timeout, tell)
    if len(_KNOWN) < _MOST_KNOWN:
        _KNOWN[key] = terms
    return terms


def check_timeout(timeout: Any) -> None:
    """Raise unless *timeout* is a number of seconds; infinity is none."""
    kind = cast("type[object]", type(timeout))
    if issubclass(kind, int | float) and kind is not bool and timeout >= 0:
        return
    remedy = "give seconds >= 0, or None for no limit"
    if issubclass(kind, list | tuple | dict):
        remedy += "; the timeout comes before the method's arguments: give those as args=(...)"
    raise SpecError("timeout", timeout, remedy)


def _check_retries(retries: object) -> None:
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise SpecError("retries", retries, "give an integer >= 0")
