"""Faults of the driver itself: it runs in a process of its own, and lives again when it was killed.

Guarantees: a driver that is killed leaves nothing, or what it left is told; what it had in flight
is excused, and the next life goes on where the time of the plan has got to; the driver ends when
this process does.

Left to others: what a life does (`session`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime import encode_by_value
from phalanx.supervision import RuntimeFault

from .belongings import Belongings, read_made
from .faults import SIGNALS
from .footprint import Footprint
from .journal import Journal, now, read_history, recording
from .kin import read_kin
from .parts import trees_of
from .referee_records import LifeEnded, Missed, Struck
from .session import Progress, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from .plan import Chaos
    from .schedule import Strike
    from .target import Target

_SIGNALS = {name: SIGNALS[name] for name in ("kill", "term")}
_RAISED = ".raised"  # a file with what ended a driver, pickled
_LOOK = 0.1
_START = 300.0  # seconds for a target to come up
_LEAST = 1.0  # seconds of the plan that are worth another life
_CLOSE = 90.0  # seconds for a driver to settle and close, beyond the limit of recovery


def run_lives(
    plan: Chaos,
    target: Target,
    folder: Path,
    on_progress: Callable[[Progress], None] | None,
    interrupt: threading.Event,
) -> None:
    """Run *plan* in drivers of their own, one after the other, until its time is up.

    Raises:
        Exception: what the factory raised, or what else ended a driver, from a `RuntimeFault` with
            its output; that alone where it cannot be pickled.
    """
    referee = _Referee(plan, target, folder, on_progress, interrupt)
    try:
        offset, life = 0.0, 0
        while plan.duration - offset >= _LEAST:
            life += 1
            killed_at = referee.live(life, offset)
            if killed_at is None or interrupt.is_set():
                break
            offset = killed_at
        referee.tell_missed()
    finally:
        referee.close()


class _Referee:
    def __init__(
        self,
        plan: Chaos,
        target: Target,
        folder: Path,
        on_progress: Callable[[Progress], None] | None,
        interrupt: threading.Event,
    ) -> None:
        self._plan = plan
        self._target = target
        self._folder = folder
        self._on_progress = on_progress
        self._interrupt = interrupt
        with recording(folder):
            self._journal = Journal(folder, "referee")
        self._done: set[int] = set()

    def live(self, life: int, offset: float) -> float | None:
        """Run one life from *offset* on; return where the plan has got to if it was killed."""
        before = Footprint.now()
        belongings = Belongings(before.files)
        what = (self._plan, self._target, str(self._folder), offset, life)
        payload = encode_by_value(what, f"target={self._target.name!r}")
        errors = self._folder / f"driver-{life}.err"
        with recording(self._folder):
            stderr = errors.open("wb")
        with stderr:
            driver = subprocess.Popen(
                [sys.executable, "-m", "phalanx.chaos.life"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,  # Ctrl-C is for us: we tell it
            )
        trees: set[str] = set()
        try:
            assert driver.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already: see its output
                driver.stdin.write(base64.b64encode(payload) + b"\n")
                driver.stdin.flush()
            at, killed = self._watch(driver, offset, trees, belongings)
        finally:
            with contextlib.suppress(OSError):
                if driver.stdin is not None:
                    driver.stdin.close()
            if driver.poll() is None:
                driver.kill()
            code = driver.wait()
            if driver.stdout is not None:
                driver.stdout.close()
        if not killed and not self._was_killed_within(code):
            if code != 0:
                tail = errors.read_text(errors="replace")[-2000:]
                msg = f"the driver of life {life} ended by itself with {code}:\n{tail}"
                fault = RuntimeFault(msg)
                raised = _raised_in(self._folder / f"driver-{life}{_RAISED}")
                raise fault if raised is None else raised from fault
            return None
        kin = read_kin(self._folder)
        made = belongings.paths | read_made(self._folder)
        for left in before.left(trees, {driver.pid}, made, kin, own=False):
            self._journal.write(left)
        self._journal.write(LifeEnded(at=now(), life=life, closed=False, how=f"status {code}"))
        return at

    def tell_missed(self) -> None:
        """Tell what nobody has done or told of: it died with a driver, or found none."""
        told = {
            record.strike
            for record in read_history(self._folder).records
            if isinstance(record, Struck | Missed)
        }
        for strike in self._plan.strikes:
            if strike.number not in told and not self._interrupt.is_set():
                self._miss(strike, "there was no driver just then")

    def close(self) -> None:
        """Write nothing more."""
        self._journal.close()

    def _was_killed_within(self, code: int) -> bool:
        """Whether the driver ended with *code* by a fault that was aimed at a moment in it."""
        if -code not in _SIGNALS.values():
            return False
        for struck in read_history(self._folder).every(Struck):
            if struck.target == "driver" and struck.lethal and struck.strike not in self._done:
                self._done.add(struck.strike)
                return True
        return False

    def _watch(
        self,
        driver: subprocess.Popen[bytes],
        offset: float,
        trees: set[str],
        belongings: Belongings,
    ) -> tuple[float, bool]:
        """Strike *driver* as planned until it ends; return when, and whether that was our doing."""
        due = [s for s in self._plan.strikes if s.is_from_outside and s.at >= offset]
        due = [strike for strike in due if strike.number not in self._done]
        began: float | None = None
        rest = b""
        killed = asked = False
        limit = time.monotonic() + _START
        assert driver.stdout is not None
        assert driver.stdin is not None
        while True:
            heard = _hear(driver)
            if heard == b"":
                break
            *lines, rest = (rest + (heard or b"")).split(b"\n")
            trees |= trees_of(driver.pid)
            belongings.look(trees)
            clock = time.monotonic()
            if lines:  # of several the latest says it all
                progress = Progress(**json.loads(lines[-1]))
                if began is None:
                    began = clock - progress.seconds
                    limit = began + self._plan.duration + self._plan.recovery_limit + _CLOSE
                if self._on_progress is not None:
                    self._on_progress(progress)
            if clock > limit:
                msg = f"the driver (pid {driver.pid}) did not come up or did not end in time"
                raise RuntimeFault(msg)
            if self._interrupt.is_set() and not asked:
                asked = True
                with contextlib.suppress(OSError):
                    driver.stdin.close()  # that is how it is told
            while began is not None and due and clock - began >= due[0].at and not asked:
                killed = self._strike(due.pop(0), driver) or killed
        at = self._plan.duration if began is None else time.monotonic() - began
        return at, killed

    def _strike(self, strike: Strike, driver: subprocess.Popen[bytes]) -> bool:
        """Do *strike* to *driver*; return whether that ends it."""
        self._done.add(strike.number)
        lethal = strike.fault in _SIGNALS
        self._journal.write(
            Struck(
                at=now(),
                strike=strike.number,
                fault=strike.fault,
                target="driver",
                point=strike.point,
                pid=driver.pid,
                lethal=lethal,
            )
        )
        with contextlib.suppress(ProcessLookupError):
            if lethal:
                os.kill(driver.pid, _SIGNALS[strike.fault])
            else:
                os.kill(driver.pid, signal.SIGSTOP)
                self._interrupt.wait(strike.seconds)
                os.kill(driver.pid, signal.SIGCONT)
        return lethal

    def _miss(self, strike: Strike, why: str) -> None:
        missed = Missed(
            at=now(), strike=strike.number, fault=strike.fault, target=strike.target, why=why
        )
        self._journal.write(missed)


def _hear(driver: subprocess.Popen[bytes]) -> bytes | None:
    """Return what *driver* wrote; None where there is nothing just now, ``b""`` at its end.

    Past the buffer of its file object, into which `select` does not see.
    """
    assert driver.stdout is not None
    readable, _, _ = select.select([driver.stdout], [], [], _LOOK)
    return os.read(driver.stdout.fileno(), 1 << 16) if readable else None


def live(lines: Any, answer: Any) -> None:
    """Be the driver of one life: what it is to do is the first of *lines*; their end is its own."""
    plan, target, folder, offset, life = pickle.loads(base64.b64decode(lines.readline()))
    stop = threading.Event()

    def listen() -> None:
        lines.read()
        stop.set()

    def tell(progress: Progress) -> None:
        answer.write(json.dumps(asdict(progress)).encode() + b"\n")
        answer.flush()

    threading.Thread(target=listen, name="chaos-lifeline", daemon=True).start()
    try:
        Session(plan, target, Path(folder), tell, offset, life, interrupt=stop).run()
    except Exception as error:
        with contextlib.suppress(Exception):  # it cannot be pickled; what it says is on stderr
            (Path(folder) / f"driver-{life}{_RAISED}").write_bytes(pickle.dumps(error))
        raise


def _raised_in(path: Path) -> Exception | None:
    """Return the exception that a driver has left in *path*, if it has, and if it can be read."""
    try:
        raised: object = pickle.loads(path.read_bytes())
    except Exception:  # noqa: BLE001  # a class of the user's that does not come back
        return None
    return raised if isinstance(raised, Exception) else None
