"""Warm spares of a rank group.

- After the group is up, the configured number of spares is starting or warm.
- A rank that died gets a warm one at once. One that is taken, or dies while it waits, is replaced,
  at once the first time and after a growing delay if spares die repeatedly.
- A spare's death is not a failure of the group. None outlives the group.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from phalanx.runtime import Event
from phalanx.supervision import BackOff, PhalanxError, Phase

if TYPE_CHECKING:
    from .handle import Group
    from .membership import Membership
    from .worker import Worker

_BACKOFF = BackOff(initial=0.5, maximum=30.0)  # arbitrary; slow enough to cost little


class StandbyLost(Event, event="standby_lost", level="warning"):
    """A spare died while it waited, or could not be started.

    Attributes:
        wait: Seconds until the next one is started.
    """

    group: str
    pid: int | None
    cause: str
    wait: float


class Standby:
    """The spares of one group. Used by its actor's thread alone."""

    def __init__(self, group: Group, membership: Membership) -> None:
        self._group = group
        self._wanted = group.spec.policy.standby
        self._membership = membership
        self._spares: dict[int, Worker] = {}
        self._last = 0
        self._losses = 0  # in a row: of spares that were not taken, and did not live for long
        self._not_before = 0.0

    @property
    def count(self) -> int:
        """The number of warm spares."""
        return sum(spare.ready for spare in self._spares.values())

    def fill_soon(self) -> None:
        """Start what is missing, after the messages that the actor has already. Any thread's."""
        self._group.post(self._fill)

    def _fill(self) -> None:
        if self._group.view.phase is not Phase.SERVING:
            return  # with the next epoch
        while len(self._spares) < self._wanted and self._group.clock() >= self._not_before:
            self._last -= 1
            try:
                self._spares[self._last] = self._membership.start_spare(self._last)
            except (PhalanxError, OSError) as error:
                self._lost(None, f"{type(error).__name__}: {error}")

    def failed(self, spare: Worker, error: BaseException) -> None:
        """Replace *spare*, whose launch has failed."""
        del self._spares[spare.rank]
        if not spare.asked:
            self._lost(None, f"{type(error).__name__}: {error}")

    def warm(self, spare: Worker) -> None:
        """Note that *spare* can be taken, unless it is about to be killed."""
        if spare.hung:
            return
        spare.ready = True
        while spare.timers:
            spare.timers.pop().cancel()

    def take(self) -> Worker | None:
        """Return a warm spare, which is none any more, or None."""
        for number, spare in list(self._spares.items()):
            process = spare.process
            if not spare.ready or process is None or process.status is not None:
                continue
            if process.is_stopped():  # it would never take its rank
                spare.hung = "it was stopped when it was needed"
                process.send_signal(signal.SIGKILL)
                spare.ready = False
                continue
            del self._spares[number]
            self._losses = 0
            return spare
        return None

    def gone(self, spare: Worker, cause: str) -> None:
        """Release *spare*, whose process has ended, and start another in time."""
        del self._spares[spare.rank]
        pid = spare.labels.pid or None
        lived = self._group.clock() - spare.started_at
        self._membership.release(spare)
        self._lost(pid, cause, lived)

    def close(self) -> None:
        """End them all."""
        spares, self._spares = list(self._spares.values()), {}
        for spare in spares:
            if spare.process is not None:  # no deadline behind it: the event loop may have ended
                spare.process.send_signal(signal.SIGKILL)
            self._membership.release(spare)

    def _lost(self, pid: int | None, cause: str, lived: float = 0.0) -> None:
        self._losses = _BACKOFF.attempt_after(self._losses, lived)
        wait = 0.0
        if self._losses > 1:
            wait = _BACKOFF.delay(self._losses - 1, self._group.jitter())
        now = self._group.clock()
        self._not_before = now + wait
        name = self._group.spec.name
        self._group.publish(StandbyLost(group=name, pid=pid, cause=cause, wait=wait, at=now))
        self._group.runtime.loop.call_at(self._not_before, self.fill_soon)
