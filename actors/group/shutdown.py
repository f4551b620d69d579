"""How workers are stopped: asked, SIGTERM, SIGKILL, at last given up; and their other limits.

- Each stage has its deadline, after which the next one follows.
- A worker that hangs has written the stacks of its threads before it is killed, if it still can.
- A message about a limit names the incarnation that it was for; a worker's timers end with it.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import STACKS, Kind, Payload, Vitals, describe_threads, size_of

from .messages import Overdue, ReformOverdue, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from phalanx.actors.health.watchdog import Watchdog
    from phalanx.actors.spec.options import StopPolicy
    from phalanx.runtime import EventLoop, Lease

    from .messages import Message
    from .worker import Worker


_LAST_BREATH = 1.0  # seconds a process may live on after its call socket, or its last words
_DOUBT = 0.5  # seconds for the news of a death that made a kept rank's joining fail
_TERMINATE = Payload.of(None).packet(Kind.TERMINATE, epoch=0, call_id=0)
_UNDEAD = 10.0  # seconds from SIGKILL until a process that does not end is looked at
_LONGEST_END = 120.0  # seconds that one may take to end: 100 ms for each GiB it held
_EXAMINE = 1.0  # seconds to write its stacks before it is killed; it takes milliseconds


class Shutdown:
    """Stops the ranks of one group by *policy*."""

    def __init__(
        self,
        policy: StopPolicy,
        loop: EventLoop,
        watchdog: Watchdog,
        tell: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._loop = loop
        self._watchdog = watchdog
        self._tell = tell
        self._clock = clock

    # --- limits of starts and re-forms; all times are seconds from now -----------------------

    def limit_start(self, member: Worker, seconds: float) -> None:
        """Give *member* so long to become ready."""
        self._after(member, seconds, Overdue(member.rank, member.incarnation, "start"))
        self._watchdog.wake(None)

    def limit_reform(self, member: Worker, *, leave: float, join: float) -> None:
        """Give *member* so long to leave its old process group, and to be ready in the new one."""
        late = partial(ReformOverdue, member.rank, member.incarnation, member.epoch)
        self._after(member, leave / 2, late("part"))
        self._after(member, leave, late("leave"))
        self._after(member, join, late("join"))
        self._watchdog.wake(None)

    def doubt_reform(self, member: Worker) -> None:
        """Post soon that *member* could not join, unless another epoch explains that."""
        failed = ReformOverdue(member.rank, member.incarnation, member.epoch, "failed")
        self._after(member, _DOUBT, failed)

    def expect_exit(self, member: Worker) -> None:
        """Post it if *member*, which has said or shown that it ends, lives on."""
        self._after(member, _LAST_BREATH, Overdue(member.rank, member.incarnation, "stream"))

    def _next(self, member: Worker, stage: str, seconds: float) -> None:
        """Give *member* so long to end before the next *stage*."""
        self._after(member, seconds, Timeout((member.rank, member.incarnation), stage))

    def _after(self, member: Worker, seconds: float, message: Message) -> None:
        at = self._clock() + seconds
        member.timers.append(self._loop.call_at(at, partial(self._tell, message)))

    # --- stages ------------------------------------------------------------------------------

    def ask_to_stop(self, member: Worker, *, hurry: bool) -> None:
        """Begin to stop *member*; further stages follow by `escalate`.

        One that still waits for its process is not launched any more, or killed by `kill_unwanted`.
        """
        if member.asked:
            return
        member.asked = True
        if member.process is None:
            return
        stop = self._policy
        if hurry:
            if stop.hurry > 0:
                self._terminate(member)
                self._next(member, "kill", stop.hurry)
            else:
                self.kill(member)
        else:
            self._next(member, "terminate", stop.ask)

    def escalate(self, member: Worker, stage: object) -> None:
        """Go one stage further with a member that has not stopped."""
        if member.process is None:
            return
        if stage == "terminate":
            self._terminate(member)
            # A stopped process takes no SIGTERM; SIGCONT lets it.
            member.process.send_signal(signal.SIGCONT)
            self._next(member, "kill", self._policy.terminate)
        else:
            self.kill(member)

    def _terminate(self, member: Worker) -> None:
        assert member.process is not None
        with suppress(OSError):  # it has ended, or hears nothing
            member.control.send(_TERMINATE)  # a worker holds off a SIGTERM that is not ours
        member.process.send_signal(signal.SIGTERM)

    def kill(self, member: Worker) -> None:
        """Kill *member* now; its exit is told like any other."""
        if member.process is not None and member.process.send_signal(signal.SIGKILL):
            if not member.killed_at:
                member.killed_at = self._clock()
            self._next(member, "abandon", _UNDEAD)

    def kill_unwanted(self, member: Worker) -> None:
        """Kill *member*, which has its process now, where it was to end before it had one."""
        if member.asked or member.hung or member.broken:
            self.kill(member)

    def kill_broken(self, members: Iterable[Worker], broken: Mapping[Lease, str]) -> None:
        """Kill those of *members* whose lease is *broken*, for the reason given with it."""
        for member in members:
            why = None if member.lease is None else broken.get(member.lease)
            if why is not None and not member.asked and not member.broken:
                member.broken = why
                self.kill(member)

    def abandon(self, member: Worker) -> str:
        """Give *member* up, which was killed and does not end; return how that looks.

        Empty where it is too early for that: a process that has begun to end gives back its memory,
        which takes its time.
        """
        process = member.process
        if process is None or process.status is not None:
            return ""
        vitals = Vitals.of(process.pid)
        took = self._clock() - member.killed_at
        if vitals.is_ending and took < _LONGEST_END:
            self._next(member, "abandon", _UNDEAD)
            return ""
        member.abandoned = True
        place = f" in {vitals.wait}" if vitals.wait else ""
        state = f"state {vitals.state or 'Z'}{place}"
        return (
            f"it withstood SIGKILL for {took:.0f} s ({state}) and is left behind as {process.pid}"
        )

    def examine(self, member: Worker, why: str, seen: str = "") -> None:
        """End *member*, which hangs, and have it write the stacks of its threads as it goes.

        *seen* is what it was found doing.
        """
        process = member.process
        if member.hung:
            return
        member.hung = f"{why}; {seen}" if seen else why
        if process is None:
            return
        member.threads = describe_threads(process.pid)
        member.words_end = size_of(member.output.faults)
        process.send_signal(STACKS)
        if process.is_stopped():
            # Only a running process handles a signal; this one takes it before anything else.
            process.send_signal(signal.SIGCONT)
        self._next(member, "kill", _EXAMINE)
