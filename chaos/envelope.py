"""What travels in place of a call's method, and of its answer, while a run looks on.

Guarantees: a worker learns from the call itself which call it is; an answer says of itself which
call, rank, incarnation and sending it is of, so that the driver's book-keeping is not its own
witness. Pickled by name; both ends are the same version of the same package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A fault that a worker does to itself, or to *whom*, at a moment that only workers see.

    Attributes:
        strike: The number of the strike in the schedule.
        key: Tells it from the others of that strike.
        fault: Its name.
        rank: Whose it is; -1 for whoever runs the call.
        at: ``running`` or ``after_reply``.
        aimed: Whether the strike was aimed at that moment, rather than at any call.
        seconds: How long it lasts, where it does.
        whom: The pid and the start (in ticks) of whom the worker signals; None for itself.
    """

    strike: int
    key: str
    fault: str
    target: str
    rank: int
    at: str = "running"
    aimed: bool = False
    seconds: float = 0.0
    whom: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A method under way to its workers.

    Attributes:
        call: The number of the call in the run.
        method: A method's name, or a callable.
        is_stream: Whether what it returns is taken item by item.
        orders: What workers are to do to themselves in it.
    """

    call: int
    method: str | Callable[..., Any]
    is_stream: bool = False
    orders: tuple[Order, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, or one item of a stream, and where it comes from.

    Attributes:
        item: Which item of its stream it is, from 0 on; None for what is no item.
    """

    call: int
    rank: int
    incarnation: int
    wire: int
    value: Any
    item: int | None = None
