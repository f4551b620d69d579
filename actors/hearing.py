"""What ranks say beside their answers, and what it means.

Guarantees: what an earlier incarnation said is dropped unread.

Left to others: reading it (`control`), what follows for the group (`decide_ranks`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from phalanx.runtime import Frame, Kind, RemoteFailure, WorkerReady
from phalanx.supervision import RankReady, RankReformed

from .notices import Emitted

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision import RankEvent

    from .deadlines import Deadlines
    from .herald import Herald
    from .keeper import Keeper
    from .member import Member
    from .notices import RankSaid
    from .shared import Shared
    from .standby import Standby
    from .stopping import Stopping


class Hearing:
    """Hears the ranks of the group called *name*. Used by its actor's thread alone.

    Args:
        find: Returns the member, or spare, of that rank and incarnation.
        show: Has the group's view made anew.
    """

    def __init__(
        self,
        name: str,
        shared: Shared,
        *,
        find: Callable[[int, int], Member | None],
        show: Callable[[], None],
        standby: Standby,
        deadlines: Deadlines,
        stopping: Stopping,
        keeper: Keeper,
        herald: Herald,
    ) -> None:
        self._name = name
        self._shared = shared
        self._seating = shared.plane.seating
        self._find = find
        self._show = show
        self._standby = standby
        self._deadlines = deadlines
        self._stopping = stopping
        self._keeper = keeper
        self._herald = herald

    def hear(self, notice: RankSaid) -> RankEvent | None:
        """Take what a rank has said; return what is to be decided on, if anything is."""
        member, frame = self._find(notice.rank, notice.incarnation), notice.frame
        if member is None or frame.incarnation != member.incarnation:
            frame.drop()
            return None
        match frame.kind:
            case Kind.STANDBY:
                self._standby.warm(member)
                self._show()
            case Kind.READY if member.seated:
                now = time.monotonic()
                return RankReformed(member.rank, member.incarnation, frame.epoch, now)
            case Kind.READY:
                return self._seat(member)
            case Kind.LEFT:
                member.left = frame.epoch
            case Kind.ENDING:
                self._seating.expect_end(member.rank, member.incarnation)
            case Kind.NOT_REFORMED:
                failure = RemoteFailure.read(frame)
                if frame.epoch == member.epoch:
                    member.failure = failure
                    self._deadlines.doubt_reform(member)
            case Kind.RESTORING:
                member.restoring = True
            case Kind.EVENT:
                self._hand_on(member, frame)
            case Kind.START_FAILED | Kind.LAST_WORDS:
                member.failure = RemoteFailure.read(frame)
                # A thread of the user's may keep the process from ending by itself.
                self._deadlines.exit(member)
            case _:
                frame.drop()
        return None

    def _seat(self, member: Member) -> RankEvent | None:
        """Have *member*, which is ready for the first time, take part in calls."""
        greeting = member.channel.receive()
        if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
            member.hung = f"its call socket is broken: {greeting!r}"
            self._stopping.kill(member)
            return None
        member.ready = True
        member.seated = True
        self._seating.join(member.rank, member.incarnation, member.channel)
        now = time.monotonic()
        self._herald.publish(WorkerReady(**member.who(), took=now - member.started_at, at=now))
        self._keeper.welcome(member)
        return RankReady(member.rank, member.incarnation, now)

    def _hand_on(self, member: Member, frame: Frame) -> None:
        """Hand an event of the user's to who listens."""
        try:
            value = frame.value()
        except Exception as error:  # noqa: BLE001  # a type this process does not know
            value = error
        now = time.monotonic()
        self._shared.deliver(
            Emitted(self._name, member.rank, member.incarnation, member.epoch, value, now)
        )
