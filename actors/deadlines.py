"""What the ranks of a group have how long for.

Guarantees: what is told when a time is over names the incarnation it was for; a member's deadlines
end with it. Who is waited for while it starts, or joins another epoch, is looked at meanwhile.

Left to others: what follows (`Suspicion`, `Stopping`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Literal

from .notices import Overdue, ReformOverdue, StopOverdue

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Hub

    from .member import Member
    from .notices import Notice
    from .watch import HangWatch

_LAST_BREATH = 1.0  # seconds a process may live on after its call socket, or its last words
_DOUBT = 0.5  # seconds for the news of a death that made a kept rank's joining fail


class Deadlines:
    """Has it told when a member's time is over; all times are seconds from now."""

    def __init__(self, hub: Hub, watch: HangWatch, tell: Callable[[Notice], None]) -> None:
        self._hub = hub
        self._watch = watch
        self._tell = tell

    def start(self, member: Member, seconds: float) -> None:
        """Give *member* so long to become ready."""
        self._after(member, seconds, Overdue(member.rank, member.incarnation, "start"))
        self._watch.wake(None)

    def reform(self, member: Member, *, leave: float, join: float) -> None:
        """Give *member* so long to leave its old process group, and to be ready in the new one."""
        late = partial(ReformOverdue, member.rank, member.incarnation, member.epoch)
        self._after(member, leave, late("leave"))
        self._after(member, join, late("join"))
        self._watch.wake(None)

    def doubt_reform(self, member: Member) -> None:
        """Have it told soon that *member* could not join, unless another epoch explains that."""
        failed = ReformOverdue(member.rank, member.incarnation, member.epoch, "failed")
        self._after(member, _DOUBT, failed)

    def stop(
        self, member: Member, stage: Literal["terminate", "kill", "abandon"], seconds: float
    ) -> None:
        """Give *member* so long to end before the next *stage*."""
        self._after(member, seconds, StopOverdue(member.rank, member.incarnation, stage))

    def exit(self, member: Member) -> None:
        """Have it told if *member*, which has said or shown that it ends, lives on."""
        self._after(member, _LAST_BREATH, Overdue(member.rank, member.incarnation, "stream"))

    def _after(self, member: Member, seconds: float, notice: Notice) -> None:
        at = time.monotonic() + seconds
        member.timers.append(self._hub.call_at(at, partial(self._tell, notice)))
