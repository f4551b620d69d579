"""What a death costs the calls that were under way. Decides; changes nothing.

Guarantees: each call gets one verdict. A call that no rank had begun is sent again at no cost; one
that had begun costs an attempt, or ends; a gather loses the dead ranks' parts only, and as a whole
is a call that no rank had begun where nobody is left who could begin it.

Left to others: reading what the dead had written, and keeping survivors from beginning more
(`plane`), doing what is decided (`settling`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.runtime import CallFate, Fate

from .terms import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.runtime import CrashReport

    from .calls import Call
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

    def fates(self, waiting: Iterable[Call] = (), *, ends: bool = False) -> tuple[CallFate, ...]:
        """Return what becomes of each call, for the crash report, oldest first.

        Where the group *ends*, nothing is sent again, and those *waiting* for their turn fail too.
        """
        told = [_fate(call, Fate.KEPT, begun=True) for call in self.parts]
        for calls, begun in ((self.begun, True), (self.untouched, False)):
            for call in calls:
                again = not ends and (call.retries > 0 or not begun)
                fate = Fate.SENT_AGAIN if again else Fate.FAILED
                told.append(_fate(call, fate, begun=begun))
        if ends:
            told += [_fate(call, Fate.FAILED, begun=False) for call in waiting]
        return tuple(sorted(told, key=lambda each: each.call_id))

    def tell_spans(self, report: CrashReport, fates: Iterable[CallFate]) -> None:
        """Tell the spans of calls, where somebody traces, of the death and of what follows."""
        traced = [call for call in (*self.parts, *self.begun, *self.untouched) if call.span]
        by_call = {each.call_id: each for each in fates} if traced else {}
        for call in traced:
            assert call.span is not None
            call.span.died(report, by_call.get(call.seq))


def assess(
    lost: Sequence[Seat], survivors: Sequence[Seat], doubted: Iterable[Call], reached: int
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
            whole = wire > reached and not any(wire in seat.sent for seat in survivors)
            (loss.untouched if whole else loss.parts).append(call)
        elif _has_begun(call, lost, reached):
            loss.begun.append(call)
        else:
            loss.untouched.append(call)
    return loss


def _fate(call: Call, fate: Fate, *, begun: bool) -> CallFate:
    left = max(0, call.retries - begun) if fate is Fate.SENT_AGAIN else 0
    return CallFate(method=call.name, call_id=call.seq, fate=fate, begun=begun, retries_left=left)


def _has_begun(call: Call, lost: Iterable[Seat], reached: int) -> bool:
    if call.shape is not Shape.COLLECTIVE:
        return any(seat.has_begun(call.wire) for seat in lost)
    # A rank that has answered may have died since: its page is gone, its answer is not.
    return call.wire <= reached or bool(call.answers) or call.failed is not None
