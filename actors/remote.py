"""The link of one rank that is elsewhere, as the driver hears of it.

Guarantees: the end of the rank's process is told once everything it had sent is there, or after a
moment; a link that is lost is told as such, once, with what is known of it.

Left to others: what a lost link means (`executor_actor`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from phalanx.runtime import Kind

from .notices import LinkLost, ProcessGone

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime import Frame, Hub, Outpost, Process, Timer

    from .notices import Notice

_LAST_WORDS = 1.0
"""Seconds from a process's end in which its link may still bring what it had sent."""


class Linked(Protocol):
    """Whose link it is: the member, which may take another rank."""

    rank: int
    incarnation: int
    timers: list[Timer]


class Remote:
    """One member's link, as the driver hears of it. Its methods run on the hub's thread.

    Attributes:
        outpost: The process at the other end.
    """

    def __init__(
        self, member: Linked, outpost: Outpost, hub: Hub, tell: Callable[[Notice], None]
    ) -> None:
        self.outpost = outpost
        self._member = member
        self._hub = hub
        self._tell = tell
        self._said = False  # the link has told how it ended; else its process here has died
        self._ended = False  # nothing more comes over it
        self._gone = False  # the member's process has ended
        self._gone_told = False
        self._lost = False

    def heard(self, frame: Frame) -> bool:
        """Return whether *frame* is about the link itself, and take note if so."""
        if frame.kind != Kind.LINK_ENDED:
            return False
        self._said = True
        why: str = frame.value()
        if why:
            self._lose(why)
        return True

    def ended(self) -> None:
        """Take note that nothing more comes."""
        if not self._said:
            self._lose("the process at the driver's end died")
        self._ended = True
        if self._gone:
            self._tell_gone()

    def process_gone(self) -> None:
        """Tell of the end of the member's process, once everything it had sent is there."""
        self._gone = True
        if self._ended:
            self._tell_gone()
        else:
            self._later(self._tell_gone)

    def outpost_gone(self, process: Process) -> None:
        """Say that the other end has died, unless the link says more about it."""
        if self._gone_told:
            return
        if why := self.outpost.why_it_left(process):
            self._lose(why)  # the driver's side may be one that no longer says anything
            return

        def tell() -> None:
            if not self._ended and not self._gone:
                status = process.status
                number = None if status is None else status.signal
                how = "" if number is None else f" by signal {number}"
                self._lose(f"the process at the rank's end died{how}")

        self._later(tell)

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            member = self._member
            self._tell(LinkLost(member.rank, member.incarnation, f"its link was lost: {why}"))

    def _tell_gone(self) -> None:
        if not self._gone_told:
            self._gone_told = True
            self._tell(ProcessGone(self._member.rank, self._member.incarnation))

    def _later(self, then: Callable[[], None]) -> None:
        at = time.monotonic() + _LAST_WORDS
        self._member.timers.append(self._hub.call_at(at, then))
