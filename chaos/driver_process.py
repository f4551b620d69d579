"""A run whose driver is hit by faults: drivers are processes, and one that was killed is replaced.

Guarantees: what a killed driver leaves is recorded as a leak; its calls in progress need no
outcome; the next driver goes on at the same place of the schedule; a driver ends when this process
does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from phalanx.runtime import encode_by_value
from phalanx.supervision import RuntimeFault

from .history.events import DriverEnded, FaultInjected, FaultMissed
from .history.journal import Journal, now, read_history, recording
from .instrumentation.leaks import RunLeaks
from .nemesis.catalog import FAULTS
from .nemesis.processes import TargetProcess
from .session import Progress, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Chaos
    from .workload.target import Target

_POLL = 0.1
_START = 300.0  # seconds for a target to come up
_LEAST = 1.0  # seconds of the duration that are worth another driver
_CLOSE = 90.0  # seconds for a driver to settle and close, beyond the limit of recovery


def run_drivers(
    plan: Chaos,
    target: Target,
    folder: Path,
    on_progress: Callable[[Progress], None] | None,
    interrupt: threading.Event,
) -> None:
    """Run *plan* in driver processes, one after the other, until its time is up.

    Raises:
        Exception: what ended a driver, from a `RuntimeFault` with its output; only the latter if
            the former cannot be pickled.
    """
    with recording(folder):
        journal = Journal(folder, "runner")
    runs = _DriverRuns(plan, target, folder, on_progress, interrupt, journal)
    try:
        offset: float | None = 0.0
        number = 0
        while offset is not None and plan.duration - offset >= _LEAST:
            number += 1
            offset = runs.run(number, offset)
            if interrupt.is_set():
                break
        runs.report_missed()
    finally:
        journal.close()


@dataclass(slots=True)
class _DriverRuns:
    plan: Chaos
    target: Target
    folder: Path
    on_progress: Callable[[Progress], None] | None
    interrupt: threading.Event
    journal: Journal
    done: set[int] = field(default_factory=set[int])  # faults of drivers that were injected

    def run(self, number: int, offset: float) -> float | None:
        """Run one driver from *offset* on; return the time at which it was killed, if it was."""
        leaks = RunLeaks(self.folder, own=False)
        what = (self.plan, self.target, str(self.folder), offset, number)
        payload = encode_by_value(what, f"target={self.target.name!r}")
        errors = self.folder / f"driver-{number}.err"
        with recording(self.folder):
            stderr = errors.open("wb")
        with stderr:
            driver = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,  # Ctrl-C is for this process
            )
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already: see its output
                driver.stdin.write(base64.b64encode(payload) + b"\n")
                driver.stdin.flush()
            at = self._observe(driver, offset, leaks)
        finally:
            with contextlib.suppress(OSError):
                driver.stdin.close()
            if driver.poll() is None:
                driver.kill()
            code = driver.wait()
            driver.stdout.close()
        if code != 0 and self._was_killed():
            for leak in leaks.left():
                self.journal.write(leak)
            ended = DriverEnded(at=now(), number=number, closed=False, how=f"status {code}")
            self.journal.write(ended)
            return at
        if code != 0:
            tail = errors.read_text(errors="replace")[-2000:]
            fault = RuntimeFault(f"driver {number} ended by itself with {code}:\n{tail}")
            raised = _raised_in(_raised_path(self.folder, number))
            raise fault if raised is None else raised from fault
        return None

    def report_missed(self) -> None:
        """Report the faults that nothing has injected or reported."""
        history = read_history(self.folder)
        known = {each.number for each in history.every(FaultInjected)}
        known |= {each.number for each in history.every(FaultMissed)}
        for fault in self.plan.planned:
            if fault.number not in known and not self.interrupt.is_set():
                self.journal.write(fault.missed("there was no driver"))

    def _was_killed(self) -> bool:
        """Whether a lethal fault of the driver was injected since the last end."""
        faults = {
            each.number
            for each in read_history(self.folder).every(FaultInjected)
            if each.target == "driver" and each.lethal
        }
        new = faults - self.done
        self.done |= faults
        return bool(new)

    def _observe(self, driver: subprocess.Popen[bytes], offset: float, leaks: RunLeaks) -> float:
        """Inject the faults of *driver* until it ends; return when."""
        assert driver.stdin is not None
        assert driver.stdout is not None
        due = [each for each in self.plan.planned if each.is_from_outside and each.at >= offset]
        process = TargetProcess.of(driver.pid)
        began: float | None = None
        rest = b""
        limit = time.monotonic() + _START
        while True:
            readable, _, _ = select.select([driver.stdout], [], [], _POLL)
            # Not through the buffer of the file object, which `select` does not see.
            data = os.read(driver.stdout.fileno(), 1 << 16) if readable else None
            if data == b"":
                break
            *lines, rest = (rest + (data or b"")).split(b"\n")
            leaks.look(driver.pid)
            clock = time.monotonic()
            if lines:  # the latest says it all
                progress = Progress(**json.loads(lines[-1]))
                if began is None:
                    began = clock - progress.seconds
                    limit = began + self.plan.duration + self.plan.recovery_limit + _CLOSE
                if self.on_progress is not None:
                    self.on_progress(progress)
            if clock > limit:
                msg = f"the driver (pid {driver.pid}) did not come up or did not end in time"
                raise RuntimeFault(msg)
            if self.interrupt.is_set():
                due.clear()
                with contextlib.suppress(OSError):
                    driver.stdin.close()  # interrupts the driver
            while began is not None and due and clock - began >= due[0].at:
                fault = due.pop(0)
                self.journal.write(fault.injected(pid=driver.pid))
                process.inject(fault.fault, fault.seconds)
                if FAULTS[fault.fault].lethal:
                    due.clear()
        return self.plan.duration if began is None else time.monotonic() - began


def _raised_path(folder: Path, number: int) -> Path:
    return folder / f"driver-{number}.raised"


def _raised_in(path: Path) -> Exception | None:
    """Return the exception that a driver has left in *path*, if it can be unpickled."""
    try:
        raised: object = pickle.loads(path.read_bytes())
    except Exception:  # noqa: BLE001  # the user's class may raise anything
        return None
    return raised if isinstance(raised, Exception) else None


def _be_driver(lines: BinaryIO, answer: BinaryIO) -> None:
    """Run the session that is the first of *lines*, until they end."""
    plan, target, folder, offset, number = pickle.loads(base64.b64decode(lines.readline()))
    interrupt = threading.Event()

    def listen() -> None:
        lines.read()
        interrupt.set()

    def report(progress: Progress) -> None:
        answer.write(json.dumps(asdict(progress)).encode() + b"\n")
        answer.flush()

    threading.Thread(target=listen, name="chaos-interrupts", daemon=True).start()
    try:
        Session(plan, target, Path(folder), interrupt, report, offset, number).run()
    except Exception as error:
        with contextlib.suppress(Exception):  # it cannot be pickled; stderr has its text
            _raised_path(Path(folder), number).write_bytes(pickle.dumps(error))
        raise


if __name__ == "__main__":
    # What the target prints must not come between the lines that the runner reads.
    own_stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _be_driver(sys.stdin.buffer, own_stdout)
    os._exit(0)  # the thread that listens may be in the middle of a read
