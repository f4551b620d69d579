"""One life of a driver: the target is built, called and struck until the time is up, then closed.

Guarantees: what was built is closed, whatever happens; a group that has given up is built again;
every caller has its answers, or is told of as waiting; what is left is looked for when everything
has been closed. A run that is to end early waits for no start, and is not judged by its recovery;
a KeyboardInterrupt ends it at once, and has its ranks killed.

Left to others: how many lives there are (`lives`), what came of it all (`result`).
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.actors import Executor, installed
from phalanx.supervision import Intensity, PhalanxError, Phase, SpecError

from .belongings import Belongings, read_made
from .faults import is_rank
from .footprint import Footprint
from .haste import hastened, kill_ranks
from .journal import Journal, now, recording
from .kin import WORKERS, Kin, keys_in, read_kin
from .parts import trees_of
from .recorder import Recorder
from .referee_records import Examined, LifeBegan, LifeEnded
from .striker import Striker
from .traffic import Callers, Mismatch, complain, make_calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .plan import Chaos
    from .recorder import Watched
    from .schedule import Strike
    from .target import Subject, Target

_LOOK = 0.25  # seconds between looks whether the group has given up, and between two progresses
_PING = 10.0
_GLANCE = 0.01
_HURRY = 0.5  # seconds for calls under way, where the run is to end early; then they fail
_LARGE_BYTES = 64 << 20
_LARGE_TIMEOUT = 30.0
_OVER = 8  # calls beyond what the queue holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        seconds: Since its traffic began.
        struck: Strikes whose time has come.
        calls: Calls by outcome.
        restarts: Deaths that led to a restart, in all groups.
        state: What the newest group is doing.
    """

    seconds: float
    duration: float
    struck: int
    strikes: int
    calls: dict[str, int]
    restarts: int
    state: str


@dataclass(slots=True)
class Session:
    """One life.

    Args:
        offset: Seconds of the plan that earlier lives have used up.
        life: 1 for the first.
        interrupt: Set by whoever wants it to end early.
    """

    plan: Chaos
    target: Target
    folder: Path
    on_progress: Callable[[Progress], None] | None = None
    offset: float = 0.0
    life: int = 1
    interrupt: threading.Event = field(default_factory=threading.Event)
    _journal: Journal = field(init=False)
    _recorder: Recorder = field(init=False)
    _striker: Striker = field(init=False)
    _belongings: Belongings = field(init=False)
    _kin: Kin = field(init=False)
    _trees: set[str] = field(default_factory=set[str])
    _subject: Subject | None = None
    _struck: int = 0
    _floods: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def run(self) -> None:
        """Run it to its end.

        Raises:
            SpecError: what was built cannot be struck as planned.
            Exception: what the factory raised when it was first called; then nothing has run.
        """
        with recording(self.folder):
            self._journal = Journal(self.folder, f"driver-{self.life}")
        before = Footprint.now(devices=_may_use_devices())
        self._kin = Kin(self.folder)
        self._striker = Striker(
            self._journal, lambda: self._recorder.groups, self._call_large, self._kin.look
        )
        widened = None if self.plan.keep_intensity else _widened(self.plan)
        self._recorder = Recorder(
            self.folder, self._journal, self._striker, life=self.life, widened=widened
        )
        self._journal.write(LifeBegan(at=now(), life=self.life, pid=os.getpid()))
        self._belongings = Belongings(before.files)
        closed = True
        try:
            with installed(self._recorder), self._belongings.noted():
                try:
                    self._subject = self._build()
                    self._trees |= trees_of(os.getpid())
                    if self._subject is not None:
                        self._check()
                        self._serve()
                finally:
                    self._trees |= trees_of(os.getpid())
                    self._close()
        except KeyboardInterrupt:
            closed = False
            kill_ranks(self._recorder.groups)
            raise
        finally:
            self._striker.finish()
            if closed:
                self._tell_left(before)
            self._journal.write(LifeEnded(at=now(), life=self.life, closed=closed))
            self._journal.close()
        if self._journal.problem is not None:
            with recording(self.folder):
                raise self._journal.problem

    def _build(self) -> Subject | None:
        """Build the target; return None where the run was ended before it had come up."""
        with hastened(self.interrupt, lambda: self._recorder.groups):
            try:
                return self.target.build()
            except Exception:
                if not self.interrupt.is_set():
                    raise
                return None  # that is what came of its start

    def _tell_left(self, before: Footprint) -> None:
        pids = {pid for pid, _ in keys_in(self.folder, WORKERS)}
        made = self._belongings.paths | read_made(self.folder)
        for left in before.left(self._trees, pids, made, read_kin(self.folder)):
            self._journal.write(left)

    # --- the run ------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse what could only come out as a run in which nothing was done."""
        subject = self._subject
        assert subject is not None
        if subject.executor is None:
            return  # what stands under a supervisor may still be coming
        if not any(group.spec.name == subject.executor.name for group in self._recorder.groups):
            remedy = (
                "returned an executor that nobody can look on at: build it in the factory, "
                'with processes (not launch="inline")'
            )
            raise SpecError("target", self.target.name, remedy)
        size = subject.executor.world_size
        for strike in self.plan.strikes:
            if is_rank(strike.target) and int(strike.target) >= size:
                remedy = f"there is no such rank: {self.target.name} has {size}, from 0 on"
                raise SpecError("target", strike.target, remedy)
            if strike.target == "standby" and not any(
                g.spec.standby for g in self._recorder.groups
            ):
                remedy = f"{self.target.name} keeps no spares: build it with standby=1 or more"
                raise SpecError("target", strike.target, remedy)

    def _serve(self) -> None:
        subject = self._subject
        assert subject is not None
        plan = self.plan
        traffic = subject.traffic or partial(_default_traffic, plan.call_timeout)
        callers = Callers(
            lambda: None if self._subject is None else self._subject.handle,
            traffic,
            [random.Random(f"{plan.seed}/{self.life}/{i}") for i in range(plan.callers)],  # noqa: S311  # drawn to be drawn again
            self._journal,
            frozenset(strike.fault for strike in plan.strikes),
        )
        began = time.monotonic() - self.offset
        callers.start()
        try:
            for strike in plan.strikes:
                if strike.at < self.offset:
                    continue
                self._wait_until(began, strike.at)
                if self.interrupt.is_set():
                    break
                self._struck += 1
                if not strike.is_from_outside:
                    self._striker.strike(strike)
            self._wait_until(began, plan.duration)
        finally:
            callers.stop()
            deadline = time.monotonic() + plan.recovery_limit
            self._settle(callers, deadline)

    def _wait_until(self, began: float, at: float) -> None:
        """Wait for that moment of the run; see to a group that has given up meanwhile."""
        while not self.interrupt.is_set():
            self._build_again()
            self._striker.provoke()
            self._belongings.look(self._trees)
            self._kin.look()
            gone = time.monotonic() - began
            self._tell(gone)
            if gone >= at:
                return
            self.interrupt.wait(min(_LOOK, at - gone))

    def _build_again(self) -> None:
        """Build the target anew where its group, or the root of its tree, has ended for good."""
        subject = self._subject
        if subject is not None:
            if not subject.is_over:
                return
            self._subject = None
            subject.close()
        # Its start may meet a fault as well: then there is none until the next look.
        with contextlib.suppress(PhalanxError):
            self._subject = self._build()

    def _settle(self, callers: Callers, deadline: float) -> None:
        """Wait for what is under way, and see whether the groups serve."""
        self._striker.let_go()
        self._wait(lambda: not any(flood.is_alive() for flood in self._floods), deadline)
        self._wait(lambda: not callers.waiting(), deadline)
        waiting = callers.waiting()
        for group in self._recorder.groups:
            if not self._is_old(group):
                examined = self._examine(group, deadline, waiting)
                if examined.ok or not self.interrupt.is_set():
                    self._journal.write(examined)

    def _wait(self, holds: Callable[[], bool], deadline: float) -> None:
        """Wait until that *holds*, or for *deadline*; hardly where the run is to end early."""
        while not holds() and time.monotonic() < deadline:
            if self.interrupt.is_set():
                deadline = min(deadline, time.monotonic() + _HURRY)
            time.sleep(_GLANCE)

    def _is_old(self, group: Watched) -> bool:
        """Whether a later group of the same name has taken its place."""
        latest = [each for each in self._recorder.groups if each.spec.name == group.spec.name]
        return latest[-1] is not group

    def _examine(self, group: Watched, deadline: float, waiting: list[str]) -> Examined:
        shared = group.shared
        settled = (Phase.SERVING, Phase.CLOSING, Phase.ENDED)
        self._wait(lambda: shared.view.phase in settled, deadline)
        phase = shared.view.phase
        ended = phase in (Phase.CLOSING, Phase.ENDED)
        limit = self.plan.recovery_limit
        detail = ""
        if waiting and not ended:
            detail = f"{', '.join(waiting)} still had no answer {limit:g} s after the last fault"
        elif phase is not Phase.SERVING and not ended:
            detail = f"it was {phase} and not serving {limit:g} s after the last fault"
        elif not ended:
            detail = self._ping(group, deadline)
        return Examined(at=now(), group=group.name, ok=not detail, ended=ended, detail=detail)

    def _ping(self, group: Watched, deadline: float) -> str:
        """Return what is wrong with *group*, which serves; nothing once every rank answers."""
        subject = self._subject
        if subject is None or subject.executor is None or subject.executor.name != group.spec.name:
            return ""
        while not self.interrupt.is_set():
            try:
                subject.executor.check_health(_PING)
            except PhalanxError as error:
                if group.shared.view.phase in (Phase.CLOSING, Phase.ENDED):
                    break  # it has given up meanwhile, which others judge
                if time.monotonic() >= deadline:
                    return f"a rank did not answer: {error}"
                time.sleep(_GLANCE)
            else:
                break
        return ""

    def _close(self) -> None:
        subject, self._subject = self._subject, None
        if subject is not None:
            with hastened(self.interrupt, lambda: self._recorder.groups):
                subject.close()

    # --- further ------------------------------------------------------------------------

    def _tell(self, seconds: float) -> None:
        if self.on_progress is None:
            return
        groups = self._recorder.groups
        self.on_progress(
            Progress(
                seconds=min(seconds, self.plan.duration),
                duration=self.plan.duration,
                struck=self._struck,
                strikes=len(self.plan.strikes),
                calls=dict(self._recorder.settled),
                restarts=sum(group.shared.view.restarts for group in groups),
                state=str(groups[-1].shared.view.phase) if groups else "starting",
            )
        )

    def _call_large(self, strike: Strike) -> None:
        """Make a call larger than any buffer, and more calls than the queue holds."""
        subject = self._subject
        executor = None if subject is None else subject.executor
        if executor is None:
            self._striker.miss(strike, "there is no executor that could be called")
            return
        self._striker.told(strike, self._recorder.groups[-1])
        flood = threading.Thread(
            target=self._flood, args=(executor,), name="chaos-large", daemon=True
        )
        self._floods.append(flood)
        flood.start()

    def _flood(self, executor: Executor[Any]) -> None:
        try:
            options: dict[str, Any] = {"timeout": _LARGE_TIMEOUT, "on_timeout": "restart"}
            load = bytes(_LARGE_BYTES)
            sizes = executor.collective_rpc(_size_of, args=(load,), **options)
            if set(sizes) != {_LARGE_BYTES}:
                error = Mismatch(f"{_LARGE_BYTES} bytes arrived as {sizes}")
                complain(self._journal, error)
            depth = self._recorder.groups[-1].spec.queue_depth
            futures = [
                executor.collective_rpc(_size_of, args=(b"",), non_block=True, **options)
                for _ in range(2 * depth + _OVER)
            ]
            for future in futures:
                future.result()
        except PhalanxError:
            pass  # an outcome as any other; it is in the history
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told
            complain(self._journal, error)


def _size_of(_worker: object, load: bytes) -> int:
    return len(load)


def _default_traffic(timeout: float, executor: Any, chance: random.Random) -> None:
    make_calls(executor, chance, timeout)


def _widened(plan: Chaos) -> Intensity:
    """Return an intensity that the faults of *plan* do not exceed, even if each ends every rank."""
    return Intensity(100 + 64 * len(plan.strikes), 60.0)


def _may_use_devices() -> bool:
    return os.path.exists("/dev/nvidiactl")  # noqa: PTH110  # one look
