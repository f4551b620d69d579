"""What a death costs the calls that were under way. Decides; changes nothing.

Guarantees: each call gets one verdict. A call that no rank had begun is sent again at no cost; one
that had begun costs an attempt, or ends; a gather loses the dead ranks' parts only.

Left to others: reading what the dead had written, and keeping survivors from beginning more
(`plane`), doing what is decided (`settling`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .calls import Call, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .seat import Seat


@dataclass(frozen=True, slots=True)
class Loss:
    """The verdicts.

    Attributes:
        parts: Gathers that lose the parts of the ranks that were lost.
        begun: Calls that a rank had begun, which costs an attempt or, without any, ends them.
        untouched: Calls that no rank had begun.
    """

    parts: list[Call] = field(default_factory=list["Call"])
    begun: list[Call] = field(default_factory=list["Call"])
    untouched: list[Call] = field(default_factory=list["Call"])


def assess(
    lost: Sequence[Seat], survivors: Iterable[Seat], doubted: Iterable[Call], reached: int
) -> Loss:
    """Return what losing *lost* means for each call, in the order of their sending.

    Args:
        lost: The ranks, whose answers have been read to the end.
        survivors: The others.
        doubted: Calls whose exception this death explains.
        reached: The last collective call that any rank has begun; none begins a later one.
    """
    touched = {call.wire: call for call in doubted}
    for seat in lost:
        for call in seat.sent.values():
            if call is not None and not call.done:
                touched[call.wire] = call
    # Withdrawn from the survivors with the others: what no rank had begun.
    for seat in survivors:
        for wire, call in seat.sent.items():
            if call is not None and call.shape is Shape.COLLECTIVE and wire > reached:
                touched[call.wire] = call
    loss = Loss()
    for wire in sorted(touched):
        call = touched[wire]
        if call.shape is Shape.GATHER:
            loss.parts.append(call)
        elif wire <= reached if call.shape is Shape.COLLECTIVE else _any_began(lost, wire):
            loss.begun.append(call)
        else:
            loss.untouched.append(call)
    return loss


def _any_began(lost: Iterable[Seat], wire: int) -> bool:
    return any(seat.has_begun(wire) for seat in lost)
