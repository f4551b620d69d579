"""Stops workers in stages: a stop request, SIGTERM, SIGKILL, and at last giving them up.

- Each stage has its deadline, after which the next one follows.
- A worker that hangs has written the stacks of its threads before it is killed, if it still can.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import STACKS, Kind, Payload

if TYPE_CHECKING:
    from collections.abc import Callable

    from .handle import Group
    from .worker import Worker


_TERMINATE = Payload.of(None).packet(Kind.TERMINATE, epoch=0, call_id=0)
_KILL_LIMIT = 10.0  # seconds from SIGKILL until a process that does not end is looked at
_LONGEST_END = 120.0  # seconds that one may take to end: 100 ms for each GiB it held
_EXAMINE = 1.0  # seconds to write its stacks before it is killed; it takes milliseconds


class Shutdown:
    """Stops the workers of *group* by its stop policy. Used by its actor's thread alone.

    Args:
        on_abandoned: Called with a worker that withstands SIGKILL, and how that looks.
    """

    def __init__(self, group: Group, on_abandoned: Callable[[Worker, str], None]) -> None:
        self._group = group
        self._policy = group.spec.limits.stop
        self._on_abandoned = on_abandoned

    def after(
        self, worker: Worker, seconds: float, call: Callable[..., object], *args: object
    ) -> None:
        """Have *call* made in so many seconds, unless *worker* has been released by then."""

        def due() -> None:
            if not worker.released:
                call(*args)

        at = self._group.clock() + seconds
        timer = self._group.runtime.loop.call_at(at, partial(self._group.post, due))
        for past in [each for each in worker.timers if not each.is_pending]:
            worker.timers.remove(past)  # a survivor gets some with each epoch
        worker.timers.append(timer)

    def ask(self, worker: Worker, *, hurry: bool) -> None:
        """Begin to stop *worker*; it gets a stop request unless there is a *hurry*.

        One that still waits for its process is not launched, or is killed by `kill_unwanted`.
        """
        if worker.asked:
            return
        worker.asked = True
        if worker.process is None:
            return
        if not hurry:
            self.after(worker, self._policy.ask, self._terminate, worker, self._policy.terminate)
        elif self._policy.hurry > 0:
            self._terminate(worker, self._policy.hurry)
        else:
            self.kill(worker)

    def _terminate(self, worker: Worker, kill_after: float) -> None:
        """Send SIGTERM, and SIGKILL after *kill_after* seconds."""
        if worker.process is None:
            return
        with suppress(OSError):  # it has ended, or reads nothing
            worker.control.send(_TERMINATE)  # a worker defers a SIGTERM of another sender
        worker.process.send_signal(signal.SIGTERM)
        worker.process.send_signal(signal.SIGCONT)  # a stopped process takes no SIGTERM
        self.after(worker, kill_after, self.kill, worker)

    def kill(self, worker: Worker) -> None:
        """Kill *worker* now; its exit is handled like any other."""
        if worker.process is not None and worker.process.send_signal(signal.SIGKILL):
            if not worker.killed_at:
                worker.killed_at = self._group.clock()
            self.after(worker, _KILL_LIMIT, self._abandon, worker)

    def kill_unwanted(self, worker: Worker) -> None:
        """Kill *worker*, which has its process now, where it was to end before it had one."""
        if worker.asked or worker.hung or worker.broken:
            self.kill(worker)

    def _abandon(self, worker: Worker) -> None:
        """Give *worker* up, which was killed and does not end.

        Not while it ends: giving back its memory takes a process its time.
        """
        process = worker.process
        if process is None or process.status is not None:
            return
        vitals = process.vitals()
        took = self._group.clock() - worker.killed_at
        if vitals.is_ending and took < _LONGEST_END:
            self.after(worker, _KILL_LIMIT, self._abandon, worker)
            return
        worker.abandoned = True
        place = f" in {vitals.wait}" if vitals.wait else ""
        state = f"state {vitals.state or 'Z'}{place}"
        left = f"it withstood SIGKILL for {took:.0f} s ({state}) and is left behind as"
        self._on_abandoned(worker, f"{left} {process.pid}")

    def examine(self, worker: Worker, why: str, seen: str = "") -> None:
        """End *worker*, which hangs, and have it write the stacks of its threads as it goes.

        *seen* is what it was found doing.
        """
        process = worker.process
        if worker.hung:
            return
        worker.hung = f"{why}; {seen}" if seen else why
        if process is None:
            return
        worker.threads = process.describe_threads()
        worker.words_end = os.fstat(worker.output.faults).st_size
        process.send_signal(STACKS)
        if process.is_stopped():
            # Only a running process handles a signal: one of its threads, before anything else.
            # Another may still answer the call.
            process.send_signal(signal.SIGCONT)
        self.after(worker, _EXAMINE, self.kill, worker)
