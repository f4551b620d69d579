"""What a driver tells of its calls, as it and its callers see them.

Guarantees: frozen values, each one line of JSON (`record`).

Left to others: hearing of it (`recorder`), and what of it may not happen (`call_rules`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .record import Ranks, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued(Record):
    """A call was made.

    Attributes:
        call: Its number, unique in the run.
        shape: ``collective``, ``gather``, ``single`` or ``pool``.
        on_death: ``fail`` or ``retry``; the latter up to *retries* times.
        rank: The one it is for; None for all, and for any.
        thread: The caller's.
        seconds: How long it had until its deadline; None for no limit.
    """

    kind: ClassVar[str] = "issued"
    group: str
    call: int
    method: str
    shape: str
    on_death: str
    retries: int = 0
    rank: int | None = None
    thread: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Record):
    """A call went to ranks; once for each attempt.

    Attributes:
        wire: The number of this sending, unique in the group.
        ranks: To whom.
    """

    kind: ClassVar[str] = "sent"
    group: str
    call: int
    wire: int
    epoch: int
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Record):
    """A call had its outcome.

    Attributes:
        outcome: ``value``, ``error`` (a worker's exception), ``died``, ``timeout``, ``closed``,
            ``cancelled`` or ``fault`` (ours).
        error: The type of what was raised; empty for none.
        deaths: Of which ranks the crash reports are that a `WorkerDied` carries, oldest first.
    """

    kind: ClassVar[str] = "settled"
    group: str
    call: int
    outcome: str
    error: str = ""
    deaths: Ranks = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Record):
    """A caller took a rank's answer, which carries the name of the run that made it.

    Attributes:
        rank: Whose answer it was taken for.
        by_call: Of which call it says it is the answer; the rest likewise.
        by_item: Which item of a stream it says it is; None for an answer.
    """

    kind: ClassVar[str] = "taken"
    group: str
    call: int
    rank: int
    by_call: int
    by_rank: int
    by_incarnation: int
    by_wire: int
    by_item: int | None = None
