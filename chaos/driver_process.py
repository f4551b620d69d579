"""A run with faults of the driver: drivers are processes, and one that was killed is replaced.

Guarantees: leftovers of a killed driver are recorded as leaks; its calls in progress need no
outcome; the next driver continues at the same place of the schedule; a driver ends when this
process does.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from phalanx.runtime import encode_by_value
from phalanx.supervision import RuntimeFault

from .history.events import DriverEnded, FaultInjected, FaultMissed
from .history.journal import Journal, now, read_history, recording
from .instrumentation.leaks import RunLeaks
from .session import Progress, Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .config import Chaos
    from .workload.target import Target

_POLL = 0.1
_START = 300.0  # seconds for a target to come up
_LEAST = 1.0  # seconds of the duration that are worth another driver
_CLOSE = 90.0  # seconds for a driver to settle and close, beyond the limit of recovery


@dataclass
class DriverRuns:
    """A run in driver processes, one after the other, until its time is up."""

    plan: Chaos
    target: Target
    folder: Path
    interrupt: threading.Event
    on_progress: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        self._done: set[int] = set()  # lethal faults of drivers that were injected
        with recording(self.folder):
            self._journal = Journal(self.folder, "runner")

    def run(self) -> None:
        """Run it to its end.

        Raises:
            Exception: what ended a driver, from a `RuntimeFault` with its output; only the latter
                if the former cannot be pickled.
        """
        killed_at: float | None = 0.0
        number = 0
        with contextlib.closing(self._journal):
            while killed_at is not None:
                number += 1
                killed_at = self._drive(number, killed_at)
                is_over = self.plan.duration - (killed_at or 0.0) < _LEAST
                if is_over or self.interrupt.is_set():
                    break
            self._report_missed()

    def _drive(self, number: int, offset: float) -> float | None:
        """Run one driver from *offset* on; return the time at which it was killed, if it was."""
        leaks = RunLeaks(self.folder, own=False)
        what = (self.plan, self.target, self.folder, offset, number)
        payload = encode_by_value(what, f"target={self.target.name!r}")
        output = self.folder / f"driver-{number}.err"
        channel, theirs = Pipe()
        with recording(self.folder):
            file = output.open("wb")
        with file, channel:
            with theirs:
                driver = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                    start_new_session=True,  # Ctrl-C is for this process
                )
            try:
                with contextlib.suppress(BrokenPipeError):  # it has ended already: see its output
                    channel.send_bytes(payload)
                at, raised = self._observe(driver, channel, leaks)
            finally:
                driver.kill()
                code = driver.wait()
        if code == 0:
            return None
        if self._was_killed():
            for leak in leaks.left():
                self._journal.write(leak)
            ended = DriverEnded(at=now(), number=number, closed=False, how=f"status {code}")
            self._journal.write(ended)
            # The driver's clock may be ahead of this one: no fault comes twice.
            past = max(each.at for each in self.plan.planned if each.number in self._done)
            return max(at, math.nextafter(past, math.inf))
        tail = output.read_text(errors="replace")[-2000:]
        fault = RuntimeFault(f"driver {number} ended by itself with {code}:\n{tail}")
        raise fault if raised is None else raised from fault

    def _report_missed(self) -> None:
        """Report the faults that nothing has injected or reported."""
        with recording(self.folder):
            history = read_history(self.folder)
        known = {each.number for each in history.every(FaultInjected)}
        known |= {each.number for each in history.every(FaultMissed)}
        for fault in self.plan.planned:
            if fault.number not in known and not self.interrupt.is_set():
                self._journal.write(fault.missed("there was no driver"))

    def _was_killed(self) -> bool:
        """Whether a lethal fault of the driver was injected since the last end."""
        with recording(self.folder):
            injected = read_history(self.folder).every(FaultInjected)
        # A rank that was killed to force a restart is in none of them.
        hits = [each for each in injected if each.target == "driver" and each.rank is None]
        lethal = {each.number for each in hits if each.lethal}
        is_new = not lethal <= self._done
        self._done |= lethal
        return is_new

    def _observe(
        self, driver: subprocess.Popen[bytes], channel: Connection, leaks: RunLeaks
    ) -> tuple[float, Exception | None]:
        """Watch *driver* until it ends; return when it did, and what it raised."""
        began: float | None = None
        raised: Exception | None = None
        is_interrupted = False
        limit = time.monotonic() + _START
        while True:
            message: Any = None
            try:
                data = channel.recv_bytes() if channel.poll(_POLL) else b""
            except (EOFError, OSError):
                break
            with contextlib.suppress(Exception):  # nothing came, or its class raises anything
                message = pickle.loads(data)
            leaks.look(driver.pid)
            clock = time.monotonic()
            if isinstance(message, Exception):
                raised = message
            elif isinstance(message, Progress):
                if began is None:
                    began = clock - message.seconds
                    limit = began + self.plan.duration + self.plan.recovery_limit + _CLOSE
                if self.on_progress is not None:
                    self.on_progress(message)
            if clock > limit:
                what = f"the driver (pid {driver.pid})"
                raise RuntimeFault(f"{what} did not come up or did not end in time")
            if self.interrupt.is_set() and not is_interrupted:
                is_interrupted = True
                with contextlib.suppress(OSError):
                    channel.send_bytes(b"")  # interrupts the driver
        return (self.plan.duration if began is None else time.monotonic() - began), raised


def _be_driver(channel: Connection) -> None:
    """Run the session that is the first message of *channel*."""
    plan, target, folder, offset, number = pickle.loads(channel.recv_bytes())
    interrupt = threading.Event()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            channel.recv_bytes()
        interrupt.set()

    threading.Thread(target=listen, name="chaos-interrupts", daemon=True).start()
    try:
        Session(plan, target, folder, interrupt, channel.send, offset, number).run()
    except Exception as error:
        with contextlib.suppress(Exception):  # it cannot be pickled; stderr has its text
            channel.send(error)
        raise


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[1]), False)
    _be_driver(Connection(int(sys.argv[1])))
    os._exit(0)  # the thread that listens may be in the middle of a read
