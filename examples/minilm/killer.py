"""A thread that kills ranks with SIGKILL while they work.

Guarantees: the same seed gives the same moments, counted in answered calls, and the same choices
among the ranks that are up; only a rank that takes calls is killed, and only while calls are in
flight; a process that has ended in the meantime is never mistaken for another one that got its
number, since a pidfd names the process.

Left to others: healing. This thread sends signals and looks at the clock, nothing else.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx import GroupUp, WorkerExited

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx import Executor

    from .ledger import Ledger


@dataclass(slots=True)
class Kill:
    """One SIGKILL.

    Attributes:
        at: When it was sent, on the monotonic clock.
        healed: When the group was whole again, on the same clock; None before.
    """

    rank: int
    pid: int
    at: float
    healed: float | None = None

    @property
    def recovery(self) -> float | None:
        """Seconds until the group was whole again, or None if it never was."""
        return None if self.healed is None else self.healed - self.at


class Killer:
    """Kills *kills* ranks of *group* while *calls* calls are made.

    Args:
        group: Whose ranks die.
        ledger: Says how far the work is.
        calls: How many calls the whole run makes.
        depth: How many of them are in flight at a time.
        kills: How many ranks to kill.
        seed: For the moments and the choices.
        note: Told of each kill and each recovery, in words.
    """

    def __init__(
        self,
        group: Executor[Any],
        ledger: Ledger,
        *,
        calls: int,
        depth: int,
        kills: int,
        seed: int,
        note: Callable[[str], None],
    ) -> None:
        self._group = group
        self._ledger = ledger
        self._unsubscribe: Callable[[], object] = lambda: None
        self._note = note
        self._random = random.Random(seed)
        # Not before the first answer, for how long a call takes is not known then; not so late that
        # nothing is left to be done, nor in the last tenth: what is killed there has little to heal
        # for.
        latest = max(0.0, min(0.9 * calls, calls - depth))
        earliest = min(1.0, latest)
        self._moments = sorted(self._random.uniform(earliest, latest) for _ in range(kills))
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self._dead: set[int | None] = set()
        self.kills: list[Kill] = []

    def start(self) -> None:
        """Begin to kill."""
        self._unsubscribe = self._group.events(self._on_event)
        self._thread.start()

    def finish(self, timeout: float) -> None:
        """Kill no more; wait at most *timeout* seconds until all that was killed is back."""
        self._stopped.set()
        self._ledger.close()
        self._changed.set()
        self._thread.join()
        deadline = time.monotonic() + timeout
        while any(kill.healed is None for kill in self.kills) and not self._group.is_failed:
            if time.monotonic() >= deadline:
                break
            self._wait_for_change()
        self._unsubscribe()

    def _on_event(self, event: object) -> None:
        match event:
            case WorkerExited(pid=pid):
                self._dead.add(pid)
            case GroupUp(at=at):
                for kill in self.kills:
                    if kill.healed is None and kill.pid in self._dead:
                        kill.healed = at
                        self._note(f"rank {kill.rank} is back after {at - kill.at:.2f} s")
            case _:
                pass
        self._changed.set()

    def _run(self) -> None:
        for moment in self._moments:
            # The whole part says after how many answers, the rest how far into the next call; the
            # answer to that ends the wait, for it may take less time than any before.
            if not self._ledger.wait_answered(int(moment)):
                return
            self._ledger.wait_answered(int(moment) + 1, (moment % 1) * self._ledger.pace)
            while not self._stopped.is_set() and not self._kill_one():
                self._wait_for_change()

    def _kill_one(self) -> bool:
        """Kill one rank; return False if none can be killed just now."""
        up = [info for info in self._group.ranks if info.state == "up" and info.pid is not None]
        shown = {info.pid for info in up}
        if any(kill.pid in shown or kill.pid not in self._dead for kill in self.kills):
            return False  # that death is not known yet
        # While ranks that share a process group meet again, some are up but none has a call.
        if not up or not self._group.status().in_flight:
            return False
        victim = self._random.choice(up)
        assert victim.pid is not None
        try:
            process = os.pidfd_open(victim.pid)
        except ProcessLookupError:
            return False
        try:
            # The descriptor names whoever has the number now; only then is it asked whose it is.
            if self._group.ranks[victim.rank].pid != victim.pid:
                return False
            kill = Kill(victim.rank, victim.pid, time.monotonic())
            signal.pidfd_send_signal(process, signal.SIGKILL)
            self.kills.append(kill)
        except ProcessLookupError:
            return False
        finally:
            os.close(process)
        self._note(f"killed rank {victim.rank} (pid {victim.pid})")
        return True

    def _wait_for_change(self) -> None:
        # Most changes come as events; the time is for those that do not, such as a call made.
        self._changed.wait(0.05)
        self._changed.clear()
