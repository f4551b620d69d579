"""Ranks that are kept, and wait in their old process group for somebody who is not there any more.

Guarantees: a rank that computes, or is in a collective operation in which something happens, is let
alone until `leave_within` is over. One that gloo will never tell that its neighbours are gone is
found within a few seconds, and ended: it cannot be freed. Where all that have yet to leave wait
for each other, their connections are ended first, for that frees whoever can be freed.

Why: see `open_gloo_connections` in `runtime.gloo`. The more ranks have to send, the more often one
of them is killed in the middle of it.

Left to others: the limits (`deadlines`, `suspicion`), ending ranks (`stopping`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx.actors.group.messages import LeaveDue
from phalanx.supervision import RankState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.actors.group.members import Members
    from phalanx.actors.group.messages import Notice
    from phalanx.actors.group.shutdown import Stopping
    from phalanx.actors.group.worker import Member
    from phalanx.runtime import Hub, Pulse
    from phalanx.supervision import GroupState

    from .heartbeat import Pulses, Question

# Seconds between two looks, and for answers. Most have left before the first; on a crowded machine
# an error may take a good part of this from gloo's thread to the one that waits.
_LOOK = 1.0
_WHY = "it waits in the old process group, where gloo has no connection left to hear from"


@dataclass(frozen=True, slots=True)
class Leaving:
    """What is to be done about ranks that have yet to leave.

    Attributes:
        lost: Those that nothing will free.
        part: Whether the connections of all of them are to be ended.
    """

    lost: frozenset[int] = frozenset()
    part: bool = False


def judge_leaving(
    before: Mapping[int, Pulse | None], now: Mapping[int, Pulse | None], epoch: int
) -> Leaving:
    """Return what follows from two looks at the ranks that have yet to leave.

    Args:
        before: What they said in the look before; None, or nothing, for who was silent.
        now: The same of this look, for all of them.
        epoch: The one they are to leave for. Who has ended its call, and is on its way out, says
            that it is in that one: it ends its connections itself.
    """
    idle = {
        rank: pulse.connections
        for rank, pulse in now.items()
        if pulse is not None
        and pulse.is_in_collective
        and pulse.epoch < epoch
        and pulse == before.get(rank)
    }
    lost = frozenset(rank for rank, connections in idle.items() if connections == 0)
    if lost:
        return Leaving(lost)  # and who waits for them is freed by their end
    return Leaving(part=idle.keys() == now.keys() and any(idle.values()))


class Leavings:
    """The ranks of one group that are to leave for an epoch. Used by its actor's thread alone.

    Args:
        state: Returns what the group is just now.
    """

    def __init__(
        self,
        members: Members,
        stopping: Stopping,
        pulses: Pulses,
        hub: Hub,
        *,
        tell: Callable[[Notice], None],
        state: Callable[[], GroupState],
    ) -> None:
        self._members = members
        self._stopping = stopping
        self._pulses = pulses
        self._hub = hub
        self._tell = tell
        self._state = state
        self._epoch = 0
        self._asked = 0
        self._question: Question | None = None
        self._seen: dict[int, Pulse | None] = {}

    def begin(self, epoch: int) -> None:
        """Watch those that have just been told to leave for *epoch*."""
        self.close()
        self._epoch = epoch
        self._seen = {}
        self._hub.call_at(time.monotonic() + _LOOK, partial(self._tell, LeaveDue(epoch)))

    def hear(self, notice: LeaveDue) -> None:
        """Ask who has yet to leave, or act on the answers."""
        if notice.epoch != self._epoch:
            return
        if not notice.question:
            self._ask()
        elif self._question is not None and notice.question == self._asked:
            self._conclude(self._question)

    def close(self) -> None:
        """Wait for no more answers."""
        if self._question is not None:
            self._question.close()
            self._question = None

    def _ask(self) -> None:
        late = self._late()
        if not late:
            return  # for the rest of this epoch
        self._asked += 1
        notice = LeaveDue(self._epoch, self._asked)
        self._question = self._pulses.ask({m.rank: m.incarnation for m in late.values()})
        self._question.when_answered(partial(self._tell, notice))
        self._hub.call_at(time.monotonic() + _LOOK, partial(self._tell, notice))

    def _conclude(self, question: Question) -> None:
        signs = question.signs()
        self.close()
        late = self._late()
        now = {rank: signs[rank].pulse if rank in signs else None for rank in late}
        found = judge_leaving(self._seen, now, self._epoch)
        self._seen = now
        for rank in found.lost:
            self._stopping.examine(late[rank], _WHY, f"waiting in {now[rank]}")
        if found.part:
            self._pulses.part({m.rank: m.incarnation for m in late.values()}, self._epoch)
        again = LeaveDue(self._epoch)
        self._hub.call_at(time.monotonic() + _LOOK, partial(self._tell, again))

    def _late(self) -> dict[int, Member]:
        """Those that have yet to leave, and are not being ended, by rank."""
        ranks = self._state().ranks
        return {
            member.rank: member
            for member in self._members.current()
            if member.epoch == self._epoch > member.left
            and not (member.asked or member.hung)
            and ranks[member.rank].state is RankState.REFORMING
        }
