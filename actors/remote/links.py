"""The links of one group whose ranks are elsewhere: one process here, and one beside each rank.

Guarantees: to the rest of the group a rank elsewhere is one next door: it has a channel, a control
socket and a process. Several launches may be under way at once.

Left to others: the processes themselves (`runtime.gateway`, `runtime.outpost`), what is heard of
each link (`Remote`).

The link of one rank that is elsewhere, as the driver hears of it.

Guarantees: the end of the rank's process is told once everything it had sent is there, or after a
moment; a link that is lost is told as such, once, with what is known of it.

Left to others: what a lost link means (`executor_actor`).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from phalanx.actors.group.messages import LinkLost, ProcessGone
from phalanx.runtime import Gateway, Kind, Outpost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.actors.group.messages import Message
    from phalanx.actors.group.worker import Worker
    from phalanx.runtime import EventLoop, Frame, LoggedEvent, Process, Runtime, Timer, Zmq


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
        self, member: Linked, outpost: Outpost, hub: EventLoop, tell: Callable[[Message], None]
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


class Links:
    """The links of one group."""

    def __init__(
        self,
        options: Zmq,
        runtime: Runtime,
        group: str,
        tell: Callable[[Message], None],
        on_event: Callable[[LoggedEvent], None],
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._tell = tell
        self._lock = threading.Lock()
        self._gateway = Gateway(
            runtime.loop, runtime.launcher, options, group=group, on_event=on_event
        )

    def launch(
        self, members: Sequence[Worker], deadline: float, is_wanted: Callable[[], bool]
    ) -> None:
        """Give each of *members* a link, whose other end has been started.

        Raises:
            RuntimeFault, OSError: one could not be; then no other end is left.
        """
        with self._lock:
            self._gateway.open(is_wanted)
            for member in members:
                self._equip(member)
        remotes = [member.remote for member in members if member.remote is not None]
        by_label = {remote.outpost.label: remote for remote in remotes}
        processes = self._runtime.launcher.launch_many(
            [remote.outpost.launch_spec() for remote in remotes],
            on_exit=lambda process: by_label[process.label].outpost_gone(process),
            deadline=deadline,
            is_wanted=is_wanted,
        )
        for remote, process in zip(remotes, processes, strict=True):
            remote.outpost.process = process

    def close(self) -> None:
        """End the driver's side; every rank is buried."""
        self._gateway.close()

    def _equip(self, member: Worker) -> None:
        control = {"control": member.control_end.fileno()}
        posting = self._gateway.berth({**member.channel.child_fds(), **control})
        labels = member.labels
        name = f"{labels.child}#{labels.incarnation}"
        title = f"phalanx: {name} outpost"
        outpost = Outpost(posting, f"{name} outpost", title, member.epoch)
        member.remote = Remote(member, outpost, self._runtime.loop, self._tell)
