"""Recovery: the verdict on each call in flight at a death: resent, retried or failed. Pure.

- Each call gets one verdict.
- A call that no rank had begun is sent again at no cost. A call that a rank had begun costs an
  attempt, or fails.
- A gather loses the parts of the dead ranks only. It counts as not begun if no rank had begun it
  and no living rank has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.runtime import CallFate, Fate

from .call import COLLECTIVE, GATHER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from phalanx.runtime import CrashReport

    from .call import Call
    from .rank import RankSlot


@dataclass(frozen=True, slots=True)
class Loss:
    """The calls in flight that a death touches.

    Attributes:
        parts: Gathers that lose the parts of the ranks that were lost.
        begun: Calls that a rank had begun.
        untouched: Calls that no rank had begun.
    """

    parts: list[Call] = field(default_factory=list["Call"])
    begun: list[Call] = field(default_factory=list["Call"])
    untouched: list[Call] = field(default_factory=list["Call"])

    def fates(self, queued: Iterable[Call] = (), *, ends: bool = False) -> tuple[CallFate, ...]:
        """Return the fate of each call, for the crash report, oldest first.

        If the group *ends*, nothing is sent again, and the *queued* calls fail too.
        """
        fates = [_fate(call, Fate.KEPT, begun=True) for call in self.parts]
        for calls, begun in ((self.begun, True), (self.untouched, False)):
            for call in calls:
                again = not ends and (call.retries > 0 or not begun)
                fate = Fate.SENT_AGAIN if again else Fate.FAILED
                fates.append(_fate(call, fate, begun=begun))
        if ends:
            fates += [_fate(call, Fate.FAILED, begun=False) for call in queued]
        return tuple(sorted(fates, key=lambda each: each.call_id))

    def trace(self, report: CrashReport, fates: Iterable[CallFate]) -> None:
        """Add the death and its consequence to the spans of the calls that are traced."""
        traced = [call for call in (*self.parts, *self.begun, *self.untouched) if call.span]
        by_call = {each.call_id: each for each in fates} if traced else {}
        for call in traced:
            assert call.span is not None
            call.span.died(report, by_call.get(call.seq))


def assess(
    lost: Sequence[RankSlot], survivors: Sequence[RankSlot], echoes: Iterable[Call], reached: int
) -> Loss:
    """Return the calls that losing *lost* touches, in the order of their sending.

    Args:
        lost: The ranks, whose answers have been read to the end.
        survivors: The others.
        echoes: Calls that failed by an exception which this death explains.
        reached: The last collective call that any rank has begun; none begins a later one.
    """
    touched = {call.wire: call for call in echoes}
    for slot in lost:
        for call in slot.sent.values():
            if not call.done:
                touched[call.wire] = call
    # Withdrawn from the survivors with the others: what no rank had begun.
    for slot in survivors:
        for wire, call in slot.sent.items():
            if not call.done and call.shape is COLLECTIVE and wire > reached:
                touched[call.wire] = call
    loss = Loss()
    for wire in sorted(touched):
        call = touched[wire]
        if call.shape is GATHER:
            whole = wire > reached and not any(wire in slot.sent for slot in survivors)
            (loss.untouched if whole else loss.parts).append(call)
        elif _has_begun(call, lost, reached):
            loss.begun.append(call)
        else:
            loss.untouched.append(call)
    return loss


def _fate(call: Call, fate: Fate, *, begun: bool) -> CallFate:
    left = max(0, call.retries - begun) if fate is Fate.SENT_AGAIN else 0
    return CallFate(method=call.name, call_id=call.seq, fate=fate, begun=begun, retries_left=left)


def _has_begun(call: Call, lost: Iterable[RankSlot], reached: int) -> bool:
    if call.shape is not COLLECTIVE:
        return any(slot.has_begun(call.wire) for slot in lost)
    # A rank that has answered may have died since: its page is gone, its answer is not.
    return call.wire <= reached or bool(call.answers) or call.failed is not None
