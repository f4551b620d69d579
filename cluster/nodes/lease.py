"""The lease of a node: the time that its ranks may run without an answer from the driver's machine.

A node sends numbered beats, which are answered. Its lease runs from the moment at which the last
answered beat was *sent*, not from the moment at which the answer arrived, which may have been in
transit for long. So the driver's machine, which knows when its last answer left, can compute a time
after which the node has ended its ranks, without a message from it.

Each side measures on its own clock; two clocks may differ in rate by `DRIFT`. That of the node goes
on while its machine is suspended (``CLOCK_BOOTTIME``); that of the driver need not.

Source: C. Gray, D. Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed file
cache consistency", SOSP 1989.
"""

from __future__ import annotations

DRIFT = 0.02
"""The share by which the clocks of two machines may differ in rate."""

QUIET = 0.2
"""The share of a lease without an answer from which on other ways are tried."""

KILL_TIME = 1.0
"""Seconds from the end of a lease until every process of the node has ended."""


def over_at(last_answer: float, duration: float) -> float:
    """Return when all of a node has ended, in seconds on the clock of *last_answer*.

    Args:
        last_answer: When the last answer to one of its beats left, or was about to.
        duration: Seconds of the lease.
    """
    return last_answer + duration * (1 + DRIFT) + KILL_TIME


class Lease:
    """The lease as the node keeps it. All times are seconds on the node's clock.

    Args:
        now: When the greeting was sent that has been answered.
        duration: Seconds from the sending of an answered beat to the end of the lease.

    Attributes:
        until: When it ends, unless a later beat is answered before.
        round_trip: Seconds from the sending of the last answered beat to its answer; 0 before.
    """

    def __init__(self, now: float, duration: float) -> None:
        self.until = now + duration
        self.round_trip = 0.0
        self._duration = duration
        self._number = 0
        self._sent: dict[int, float] = {}  # beats without an answer: when they were sent

    def beat(self, now: float) -> int:
        """Return the number of the beat that is sent now, or after."""
        self._number += 1
        self._sent[self._number] = now
        return self._number

    def answered(self, number: int, now: float) -> bool:
        """Extend the lease from the sending of beat *number*; False if it is over, which is final.

        An answer to a beat that is unknown, or older than one that was answered, changes nothing.
        """
        if self.is_over(now):
            return False
        sent = self._sent.get(number)
        if sent is not None:
            self.until = max(self.until, sent + self._duration)
            self.round_trip = now - sent
            self._sent = {late: at for late, at in self._sent.items() if late > number}
        return True

    def is_quiet(self, now: float) -> bool:
        """Return whether no beat of the last while has been answered."""
        return now >= self.until - (1 - QUIET) * self._duration

    def is_over(self, now: float) -> bool:
        """Return whether every process of the node has to be ended now."""
        return now >= self.until
