"""An executor's place in a supervision tree.

Guarantees: nothing of it holds on to the executor, so a place outlives those that follow each other
in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision import ExitReason, SupervisorSnapshot

    from .cuts import Cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What an executor has of the supervisor it is a child of.

    Attributes:
        on_end: Told why the group has ended, once, whatever the cause.
        on_use: Told when a rank has served a call, at the rank's end at the latest.
        emit_by: Given what logs events, for those of the tree.
        look: Returns what the tree looks like.
        cuts: What keeps the states of the ranks beyond one executor; None where none are kept.
    """

    on_end: Callable[[ExitReason], None]
    on_use: Callable[[], None]
    emit_by: Callable[[Callable[[Any], object]], None]
    look: Callable[[], SupervisorSnapshot]
    cuts: Cuts | None
