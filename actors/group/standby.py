"""The warm spares of one rank group.

- After the group is up, as many spares as were asked for are starting or warm.
- A rank that died gets a warm one at once. One that is taken, or dies while it waits, is replaced,
  at once the first time and after a growing delay if they go on dying.
- A spare's death is no failure of the group. None outlives the group.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.supervision import BackOff, PhalanxError

from .messages import Timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import EventLoop

    from .launcher import Launch
    from .members import Members
    from .messages import Message
    from .shutdown import Shutdown
    from .worker import Worker

_BACKOFF = BackOff(initial=0.5, maximum=30.0)  # arbitrary; slow enough to harm nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyLost:
    """A spare died while it waited, or could not be started.

    Attributes:
        wait: Seconds until the next one is started.
    """

    event: ClassVar[str] = "phalanx.standby_lost"
    level: ClassVar[str] = "warning"
    group: str
    pid: int | None
    cause: str
    wait: float
    at: float


class Standby:
    """The spares of one group. Used by its actor's thread alone."""

    def __init__(
        self,
        wanted: int,
        members: Members,
        stopping: Shutdown,
        hub: EventLoop,
        *,
        tell: Callable[[Message], None],
        publish: Callable[[Any], None],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._wanted = wanted
        self._members = members
        self._stopping = stopping
        self._hub = hub
        self._tell = tell
        self._publish = publish
        self._spares: dict[int, Worker] = {}
        self._last = 0
        self._losses = 0  # in a row, without one that became warm
        self._not_before = 0.0

    @property
    def count(self) -> int:
        """How many are warm."""
        return sum(spare.ready for spare in self._spares.values())

    def find(self, number: int) -> Worker | None:
        """Return that spare, while it is one."""
        return self._spares.get(number)

    def fill(self) -> None:
        """Start what is missing, unless it is too early for that."""
        while len(self._spares) < self._wanted and self._clock() >= self._not_before:
            self._last -= 1
            try:
                self._spares[self._last] = self._members.start_spare(self._last)
            except (PhalanxError, OSError) as error:
                self._lost(None, f"{type(error).__name__}: {error}")

    def land(self, launch: Launch) -> None:
        """Take over the spare that was launched, or see to another."""
        (spare,) = launch.members
        error = self._members.land(launch)
        if error is None:
            self._stopping.kill_unwanted(spare)
            return
        del self._spares[spare.rank]
        if not spare.asked:
            self._lost(None, f"{type(error).__name__}: {error}")

    def warm(self, spare: Worker) -> None:
        """Note that *spare* can be taken."""
        spare.ready = True
        self._losses = 0
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
            return spare
        return None

    def gone(self, spare: Worker) -> None:
        """Bury *spare*, whose process has ended, and see to another."""
        del self._spares[spare.rank]
        failure = spare.failure
        status = spare.process.status if spare.process is not None else None
        cause = spare.hung or "it exited"
        if failure is not None:
            cause = failure.headline
        elif status is not None and status.signal is not None:
            cause = spare.hung or f"signal {status.signal}"
        pid = spare.labels.pid or None
        self._members.release(spare)
        self._lost(pid, cause)

    def close(self) -> None:
        """End them all."""
        self._wanted = 0
        spares, self._spares = list(self._spares.values()), {}
        for spare in spares:
            self._stopping.kill(spare)
        for spare in spares:
            self._members.release(spare)

    def _lost(self, pid: int | None, cause: str) -> None:
        self._losses += 1
        wait = 0.0
        if self._losses > 1:
            jitter = random.random()  # noqa: S311  # spreads starts, hides nothing
            wait = _BACKOFF.delay(self._losses - 1, jitter)
        now = self._clock()
        self._not_before = now + wait
        group = self._members.name
        self._publish(StandbyLost(group=group, pid=pid, cause=cause, wait=wait, at=now))
        self._hub.call_at(self._not_before, lambda: self._tell(Timeout("standby", "refill")))
