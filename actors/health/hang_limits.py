"""The limits of one group: when to check for hung ranks, and which ranks are past theirs.

- A timer runs while ranks owe replies, start or are re-formed; none runs at rest.
- A rank's time counts from when it began its call, as its progress page shows, not from the send.
- Without a limit only a rank in state T (stopped, not traced) counts as hung.
- After a pause of the driver (SIGSTOP, suspend) pending messages are read first, and all limits
  begin anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.actors.calls.rank import Progress
    from phalanx.runtime import EventLoop, Timer


_PAUSE = 1.0  # seconds by which a check is late that count as a pause of this process
_CHECKS = 4  # checks of a rank in the time that it may be stopped


class HangLimits:
    """The timer and the limits of one group.

    Args:
        stopped_after: Seconds a rank may be stopped; None for no limit.
        on_due: Called when a check is due, with the time for which it was scheduled.
    """

    def __init__(
        self, loop: EventLoop, stopped_after: float | None, on_due: Callable[[float], None]
    ) -> None:
        self._loop = loop
        self._stopped_after = stopped_after
        self._on_due = on_due
        self._timer: Timer | None = None
        self._resumed = 0.0  # when this process was last seen to go on after a pause
        self._stopped: dict[tuple[int, int], float] = {}  # (rank, incarnation): first seen so

    def wake(self, limit: float | None) -> None:
        """Schedule a check in time for a call limited to *limit* seconds; None for no limit."""
        delays = [limit] if limit is not None else []
        if self._stopped_after is not None:
            delays.append(self._stopped_after / _CHECKS)
        if delays:
            self._schedule(self._loop.time() + min(delays))

    def judge(
        self,
        due: float,
        running: Iterable[Progress],
        is_stopped: Callable[[Progress], bool],
        now: float,
    ) -> list[tuple[Progress, str]]:
        """Return the ranks past their limits, each with why; schedule the next check.

        *due* is when this one was to be.
        """
        if now - due > _PAUSE:
            self._resumed = now
            self._stopped.clear()
        hung: list[tuple[Progress, str]] = []
        stopped: dict[tuple[int, int], float] = {}
        checks: list[float] = []
        for rank in running:
            if (limit := self._stopped_after) is not None:
                checks.append(now + limit / _CHECKS)
                if is_stopped(rank):
                    key = rank.rank, rank.incarnation
                    since = stopped[key] = self._stopped.get(key, now)
                    if now - since >= limit:
                        hung.append((rank, f"stopped for {now - since:.1f} s"))
                        continue
                    checks.append(since + limit)
            if rank.shortest is not None:
                checks.append(now + rank.shortest)
            if rank.limit is not None:
                began = max(rank.began, self._resumed, now if rank.spoke else 0.0)
                if now - began >= rank.limit:
                    text = f"{rank.method} ran for {now - rank.began:.1f} s"
                    hung.append((rank, f"{text}, hang_after={rank.limit:g} s"))
                    continue
                checks.append(began + rank.limit)
        self._stopped = stopped
        if checks:
            self._schedule(min(checks))
        return hung

    def close(self) -> None:
        """Stop the timer."""
        if (timer := self._timer) is not None:
            timer.cancel()

    def _schedule(self, at: float) -> None:
        # Without a lock, for callers hold the plane's: a race causes one check too many at worst.
        if (timer := self._timer) is not None and timer.is_pending:
            if timer.at <= at:
                return
            timer.cancel()
        self._timer = self._loop.call_at(at, lambda: self._on_due(at))
