"""Desync detection: ranks of a process group that leave one collective call differently.

- If a rank raises in a collective call that others have not answered, no rank begins a later call,
  or output, until all have answered this one, or the group has been re-formed.
- Calls behind it that no rank had begun are withdrawn and sent again afterwards.
- If a rank stays in the call beyond a grace period, or an exception says that the process group is
  broken, the group's actor is notified (*on_desync*) and re-forms the group.

A worker whose method or `AsyncOutput` raised in a process group waits for `Kind.GO_ON`: its next
operation would match the others one operation off. It gets that once no rank is in the call.

Guarded by the plane's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.runtime import Flag, Frame, Kind, LargeFrame, RemoteFailure

from .call import COLLECTIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .call import Call
    from .plane import CallPlane
    from .rank import RankSlot, RankTable
    from .sender import Sender

_GRACE = 0.5  # seconds for the other ranks to leave the call too, or for a death to become known
_LONGEST_GRACE = 10.0  # the same if a rank has announced its end: that may take its time
_WHY = Flag.HELD | Flag.BROKEN


@dataclass(frozen=True, slots=True)
class Desync:
    """Why the ranks of a group cannot go on together.

    Attributes:
        why: The same as a text.
        rank: The rank to be ended, so that the group is re-formed.
        is_stuck: Whether that rank is still in a call.
    """

    why: str
    rank: int
    incarnation: int
    is_stuck: bool


@dataclass(slots=True)
class _Split:
    """A call that some ranks have left by an exception.

    Attributes:
        call: The call; None if it had been settled before.
        error: The first exception, as it came.
        rank: The rank that raised it.
        raised: All ranks that have raised.
        held: Those of them, by rank and incarnation, that wait for `Kind.GO_ON`.
        broken: The first exception that says that the process group is broken, and its rank.
        since: When it began, or a split before it ended.
        longest: When its grace ends at the latest.
        holds: Whether it holds back the calls behind it.
    """

    call: Call | None
    error: Frame
    rank: int
    since: float
    longest: float
    raised: set[int] = field(default_factory=set[int])
    held: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    broken: tuple[Frame, int] | None = None
    holds: bool = False


class DesyncMonitor:
    """The split calls of one group.

    Args:
        on_desync: Called with the number of a sending after which the group cannot go on.

    Attributes:
        splits: By the number of the sending.
    """

    def __init__(
        self, plane: CallPlane, table: RankTable, sender: Sender, on_desync: Callable[[int], None]
    ) -> None:
        self._plane = plane
        self._table = table
        self._sender = sender
        self._on_desync = on_desync
        self.splits: dict[int, _Split] = {}

    def note(self, call: Call | None, slot: RankSlot, frame: Frame) -> None:
        """Note that *slot* has left a call by an exception; *call* is None if it is settled."""
        why = frame.flags & _WHY
        if not why:
            return
        wire = frame.call_id
        if slot.leaving:  # the group is being re-formed already
            if why & Flag.HELD:
                self._sender.say(slot, Kind.GO_ON, wire)
            return
        split = self.splits.get(wire)
        if split is None:
            now = self._plane.clock()
            split = _Split(call, frame, slot.rank, now, now + _LONGEST_GRACE)
            self.splits[wire] = split
        split.raised.add(slot.rank)
        if why & Flag.HELD:
            split.held.add((slot.rank, slot.incarnation))
        if why & Flag.BROKEN and split.broken is None:
            split.broken = (frame, slot.rank)
        if not split.holds and (split.broken or (len(split.raised) == 1 and self._inside(wire))):
            self._hold_back(split, wire)

    def explains_itself(self, call: Call) -> bool:
        """Whether no death is to be waited for: every rank has raised, and it is not retried."""
        split = self.splits.get(call.wire)
        return split is None or (len(split.raised) == len(self._table) and not call.retries)

    def look(self, wire: int) -> None:
        """End the split since *wire* if every rank has left that call."""
        split = self.splits.get(wire)
        if split is None or self._inside(wire):
            return
        if split.broken is None:
            self._end(wire)
        elif len(split.raised) == len(self._table):
            self._on_desync(wire)  # no rank has died of it: there is nothing to wait for

    def diagnose(self, wire: int) -> Desync | None:
        """Return why the ranks cannot go on since *wire*; None if they can, or a death is due."""
        split = self.splits.get(wire)
        if split is None:
            return None
        name = "an earlier call" if split.call is None else repr(split.call.name)
        if split.broken is not None:
            frame, rank = split.broken
            error = _raised(frame, headline=True)
            why = f"the process group is broken: rank {rank} raised {error} in {name}"
            if split.rank != rank:
                why += f", where rank {split.rank} had raised {_raised(split.error)}"
            slot = self._table.at(rank)
            stuck = False
        else:
            inside = self._inside(wire)
            if not inside:
                self.look(wire)
                self._plane.pump()
                return None
            slot, stuck = inside[0], True
            others = "rank" if len(inside) == 1 else "ranks"
            ranks = ", ".join(str(each.rank) for each in inside)
            why = (
                f"the ranks are out of step: rank {split.rank} raised {_raised(split.error)} "
                f"in {name}, {others} {ranks} had not ended it after {_GRACE:g} s"
            )
        if slot is None or slot.ended:
            self._wait(wire)  # its death is coming, and ends this
            return None
        return Desync(why, slot.rank, slot.incarnation, stuck)

    def echoes(self, lost: Sequence[RankSlot] | None) -> list[Call]:
        """Return the calls whose exception the death of the first of *lost* explains.

        It also explains that of a call to be retried, for which the group is re-formed. The other
        failed calls are settled: what the dead rank has raised itself, and all of them without a
        death.
        """
        explained: list[Call] = []
        for split in tuple(self.splits.values()):
            call = split.call
            if call is None or call.done or call.failed is None:
                continue
            if lost and (call.retries or lost[0].rank not in split.raised):
                explained.append(call)
            else:
                self._plane.withdraw(call)
        return explained

    def calls(self) -> list[Call]:
        """Return the split calls that are not settled."""
        calls = (split.call for split in self.splits.values())
        return [call for call in calls if call is not None and not call.done]

    def release(self, slot: RankSlot) -> None:
        """Have *slot*, which is to leave its process group, go on to the message that says so."""
        slot.leaving = True
        who = (slot.rank, slot.incarnation)
        for wire, split in self.splits.items():
            if who in split.held:
                split.held.discard(who)
                self._sender.say(slot, Kind.GO_ON, wire)

    def after_death(self) -> None:
        """End the splits that a death has ended, or that it explains."""
        for wire, split in tuple(self.splits.items()):
            if split.broken is not None or not self._inside(wire):
                self._end(wire)

    def begin_epoch(self) -> None:
        """Note that the ranks that had to leave their process group are in the next one."""
        for slot in self._table:
            if slot.leaving:
                slot.leaving = False
                for wire in tuple(self.splits):
                    self._end(wire)

    def _inside(self, wire: int) -> list[RankSlot]:
        """Return the ranks that may still be in the call *wire*, or in its `AsyncOutput`."""
        return [slot for slot in self._table if wire in slot.sent]

    def _hold_back(self, split: _Split, wire: int) -> None:
        """Send no call while *split* lasts, and take back the calls that no rank has begun."""
        split.holds = True
        self._plane.holds += 1
        reached = self._sender.withdraw_unbegun()
        behind = {
            number: call
            for slot in self._table
            for number, call in slot.sent.items()
            if not call.done and number > reached and call.shape is COLLECTIVE
        }
        self._plane.retract(behind)
        self._wait(wire)

    def _end(self, wire: int) -> None:
        """Have the ranks that were held go on behind the call *wire*."""
        split = self.splits.pop(wire)
        for rank, incarnation in split.held:
            slot = self._table.find(rank, incarnation)
            if slot is not None and not slot.ended:
                self._sender.say(slot, Kind.GO_ON, wire)
        if split.holds:
            self._plane.holds -= 1
        now = self._plane.clock()
        for other in self.splits.values():
            other.since = now  # a rank that was held could not come to that one before

    def _wait(self, wire: int, at: float | None = None) -> None:
        when = self._plane.clock() + _GRACE if at is None else at
        self._plane.loop.call_at(when, lambda: self._end_grace(wire))

    def _end_grace(self, wire: int) -> None:
        """Settle what waited for a death, and report the split if it lasts; takes the lock."""
        with self._plane.lock.asked():
            split = self.splits.get(wire)
            if split is None:
                return
            if not len(self._table):  # the group has ended
                self.splits.clear()
                return
            now = self._plane.clock()
            ending = any(slot.ended or slot.ending for slot in self._table)
            if ending and now < split.longest:
                # A rank has closed its channel, or announced its end, and lives: its death is due.
                self._wait(wire)
                return
            call = split.call
            if call is not None and call.retries and split.broken:
                call = None  # it waits for the group to be re-formed
            if call is not None and not call.done and call.failed is not None:
                self._plane.withdraw(call)
            # A rank that has not come to that call is in an earlier one, which is independent.
            late = [
                max(split.since, slot.channel.page.begun_at) + _GRACE
                for slot in self._inside(wire)
                if slot.has_begun(wire)
            ]
            due = min(late, default=now + _GRACE)
            if split.broken is not None or due <= now:
                self._on_desync(wire)
                due = now + _GRACE
            else:
                self.look(wire)
            if wire in self.splits:
                self._wait(wire, due)
            self._plane.pump()


def _raised(frame: Frame, *, headline: bool = False) -> str:
    """Return the exception's type or *headline*, as far as it is known without decoding *frame*."""
    failure = None if isinstance(frame, LargeFrame) else RemoteFailure.read(frame)
    if failure is None:
        return "an exception"
    return failure.headline if headline else failure.type_name
