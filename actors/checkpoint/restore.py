"""The part of an executor's actor that sees to the states of its ranks.

Guarantees: a state from which a rank could not be restored is not given again while there is
another one; what has been kept, lost, rejected and given back is told as an event each. Without a
`CheckpointPolicy` nothing here does anything.

Left to others: which states belong together (`cuts`) and are kept (`kept`), starting ranks
(`members`).
Used by the actor's thread alone.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from phalanx.actors.group.messages import CutDue, CutFailed, CutsChanged
from phalanx.actors.spec.checkpoint_policy import (
    CheckpointFailed,
    CheckpointRejected,
    CheckpointRestored,
    CheckpointTaken,
)
from phalanx.actors.spec.worker import WorkerActor
from phalanx.supervision import ExitKind

from .coordinator import saving_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.actors.calls.plane import Plane
    from phalanx.actors.group.worker import Member
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Hub
    from phalanx.supervision import ExitReason, StartRanks

    from .coordinator import Cuts
    from .store import Gift


_QUIET = 1.0  # seconds between two log lines about states taken: there may be thousands
_STILL = 60.0  # seconds between two log lines about states that cannot be taken for the same cause


class Keeper:
    """See the module's docstring.

    Args:
        cuts: None where no states are kept.
        publish: Logs an event and tells the executor's listeners.
        deliver: Tells them alone.
        ends: Whether *cuts* end with the executor.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        cuts: Cuts | None,
        plane: Plane,
        publish: Callable[[Any], None],
        deliver: Callable[[Any], None],
        *,
        ends: bool,
    ) -> None:
        self._spec = spec
        self._cuts = cuts
        self._plane = plane
        self._publish = publish
        self._deliver = deliver
        self._said = -_QUIET
        self._failing: dict[str, float] = {}  # what is in the log already, and since when
        self._ends = ends

    def open(self, hub: Hub, tell: Callable[[Any], None]) -> int | None:
        """Claim where states are kept; return what their numbers are counted from.

        Raises:
            SpecError, OSError: that cannot be, or what is there cannot be used.
        """
        if self._cuts is None:
            return None
        can_reshard = self._spec.worker.reshard is not WorkerActor.reshard
        self._cuts.open(hub, tell, can_reshard=can_reshard, size=self._spec.world_size)
        return self._cuts.base

    def close(self) -> None:
        """Serve no more."""
        if self._cuts is not None:
            self._cuts.close(forget=self._ends)

    def hear(self, notice: CutDue | CutFailed | CutsChanged) -> None:
        """Act on what the ranks have stored, or are to store."""
        assert self._cuts is not None
        now = time.monotonic()
        group = self._spec.name
        match notice:
            case CutDue():
                with contextlib.suppress(Exception):  # the group is ending, or memory is short
                    self._plane.insert(saving_call(self._plane, 0, None, now))
            case CutFailed(rank, number, failure):
                error = failure.headline
                lost = CheckpointFailed(
                    group=group, rank=rank, number=number, error=error, trace=failure.trace, at=now
                )
                if now - self._failing.get(error, -_STILL) >= _STILL:
                    self._failing[error] = now
                    self._publish(lost)
                else:
                    self._deliver(lost)
            case CutsChanged(kept):
                self._cuts.prune()
                if kept is not None:
                    self._failing.clear()
                    taken = kept.show(self._cuts.kept.where)
                    took = now - kept.began
                    event = CheckpointTaken(group=group, checkpoint=taken, took=took, at=now)
                    if now - self._said >= _QUIET:
                        self._said = now
                        self._publish(event)
                    else:
                        self._deliver(event)

    def gifts(self, start: StartRanks) -> Mapping[int, Gift]:
        """Return what the ranks that are about to be started are given back; theirs to close.

        Raises:
            RuntimeFault: there were states, and none of them can be used.
        """
        if self._cuts is None:
            return {}
        return self._cuts.kept.choose([rank for rank, _ in start.ranks], start.size, self._reject)

    def welcome(self, member: Member) -> None:
        """*member* is ready, and has been given back its state if there was one."""
        if member.gift is None:
            return
        self._publish(
            CheckpointRestored(
                group=self._spec.name,
                rank=member.rank,
                incarnation=member.incarnation,
                number=member.gift.number,
                age=member.gift.age,
                at=time.monotonic(),
            )
        )

    def blame(self, member: Member, reason: ExitReason) -> None:
        """Have another state given next time, where *member* has died of restoring this one."""
        if self._cuts is None or member.gift is None or member.ready or not member.restoring:
            return
        # A kill says nothing about the state: whoever sent it may strike the next one too.
        if reason.kind not in (ExitKind.CRASH, ExitKind.UNRESPONSIVE):
            return
        if self._cuts.kept.reject(member.rank, member.gift.number):
            self._reject(
                member.gift.number, f"rank {member.rank} could not be restored from it: {reason}"
            )

    def prune(self) -> None:
        """Remove what the dead have left: none of them writes any more."""
        if self._cuts is not None:
            self._cuts.prune(everything=True)

    def prospect(self, rank: int) -> str:
        """Return what *rank*'s next incarnation is given back, in words; empty for nothing."""
        if self._cuts is None:
            return ""
        next_one = self._cuts.kept.latest(rank)
        if next_one is None:
            return "none was kept: it begins anew"
        age = max(0.0, time.time() - next_one.at)
        return f"snapshot {next_one.number}, {age:.1f} s old, in {next_one.where or 'memory'}"

    def _reject(self, number: int, why: str) -> None:
        now = time.monotonic()
        self._publish(CheckpointRejected(group=self._spec.name, number=number, why=why, at=now))
