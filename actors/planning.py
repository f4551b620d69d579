"""The planned change of a group: a restart or a resize that somebody asked for and waits for.

Guarantees: one at a time; whoever waits for one is woken, whether or not it was carried out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.supervision import Phase, ResizeAsked, RestartAsked

if TYPE_CHECKING:
    from phalanx.supervision import GroupState, RankEvent

    from .notices import Planned


class Planning:
    """The planned changes of one group. Used by its actor's thread alone.

    Attributes:
        count: How many have been begun, in all.
        at: When the latest was begun, on the monotonic clock; at first when this was made.
    """

    def __init__(self) -> None:
        self._plan: Planned | None = None
        self.count = 0
        self.at = time.monotonic()

    def begin(self, plan: Planned, state: GroupState) -> RankEvent | None:
        """Return what is to be decided on; None where *plan* has come too late, or too early."""
        has_ranks = plan.ranks <= {rank.number for rank in state.ranks}
        if state.phase is not Phase.SERVING or self._plan is not None or not has_ranks:
            plan.done.set()
            return None
        plan.accepted = True
        self._plan = plan
        self.count += 1
        self.at = now = time.monotonic()
        if plan.size is not None:
            return ResizeAsked(plan.size, now)
        return RestartAsked(plan.ranks, now, force=plan.force)

    def finish(self, *, accepted: bool) -> None:
        """Wake whoever waits: the change is done, or was not *accepted* after all."""
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.accepted = accepted
            plan.done.set()
