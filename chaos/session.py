"""A session: the part of a run in one driver process.

The target is built, called and subjected to faults until the time is up; then the steady state is
checked, the target is closed, and leaks are searched for.

Guarantees: a built target is closed in any case; a group that has given up is built again. A
run that is interrupted waits for no start, and its recovery is not checked; KeyboardInterrupt ends
it at once and kills its ranks.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phalanx.actors import installed
from phalanx.supervision import Intensity, PhalanxError, Phase, SpecError

from .history.events import DriverEnded, DriverStarted, SteadyStateChecked
from .history.journal import Journal, now, recording
from .instrumentation.driver_probe import DriverProbe
from .instrumentation.leaks import RunLeaks, name_files
from .nemesis.catalog import FAULTS, is_rank
from .nemesis.nemesis import Nemesis, kill_ranks
from .workload.generator import Callers, make_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from .config import Chaos
    from .instrumentation.driver_probe import ObservedGroup
    from .workload.target import BuiltTarget, Target

_LOOK = 0.25  # seconds between looks whether the group has given up, and between two progresses
_PING = 10.0
_POLL = 0.01
_KILL_POLL = 0.05
_HURRY = 0.5  # seconds for calls in progress after an interrupt; then they fail
_SETTLED = (Phase.SERVING, Phase.CLOSING, Phase.ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run.

    Attributes:
        seconds: Since its traffic began.
        injected: Faults whose time has come.
        planned: Faults of the schedule.
        calls: How many ended with each outcome.
        restarts: Restarts in all groups.
        state: Of the newest group.
    """

    seconds: float
    duration: float
    injected: int
    planned: int
    calls: dict[str, int]
    restarts: int
    state: str


@dataclass
class Session:
    """The part of a run in this process.

    Attributes:
        offset: Seconds of the duration that earlier drivers have used up.
        number: Of the driver; 1 for the first.
        interrupt: Ends the session early when it is set.
    """

    plan: Chaos
    target: Target
    folder: Path
    interrupt: threading.Event
    on_progress: Callable[[Progress], None] | None = None
    offset: float = 0.0
    number: int = 1

    def __post_init__(self) -> None:
        self._built: BuiltTarget | None = None
        self._build_error: PhalanxError | None = None
        self._injected = 0
        with recording(self.folder):
            self._journal = Journal(self.folder, f"driver-{self.number}")
        self._leaks = RunLeaks(self.folder)
        with recording(self.folder):
            self._nemesis = Nemesis(
                self.folder, self._journal, groups=lambda: [*self._probe.groups], look=self._look
            )
        # Not exceeded even if each fault ends every rank.
        raised = Intensity(100 + 64 * len(self.plan.planned), 60.0)
        intensity = None if self.plan.keep_intensity else raised
        self._probe = DriverProbe(self.folder, self._journal, self._nemesis, self.number, intensity)

    def _look(self) -> None:
        places = [node.place for group in self._probe.groups for node in group.shared.nodes()]
        self._leaks.look(os.getpid(), places)

    def run(self) -> None:
        """Run the session to its end.

        Raises:
            SpecError: the target cannot have the faults of the plan.
            Exception: what the factory raised, also when it built the target again.
        """
        self._journal.write(DriverStarted(at=now(), number=self.number, pid=os.getpid()))
        closed = True
        try:
            with installed(self._probe), contextlib.ExitStack() as after:
                after.callback(name_files())
                try:
                    self._built = self._build()
                    if self._built is not None:
                        self._check_ranks(self._built)
                        self._serve(self._built)
                except KeyboardInterrupt:
                    self.interrupt.set()
                    kill_ranks([*self._probe.groups])
                    raise
                finally:
                    built, self._built = self._built, None
                    try:
                        self._look()
                    finally:
                        if built is not None:
                            with self._killing_starts():
                                built.close()
        except KeyboardInterrupt:
            closed = False
            kill_ranks([*self._probe.groups])
            raise
        finally:
            self._nemesis.close()
            for leak in self._leaks.left() if closed else ():
                self._journal.write(leak)
            self._journal.write(DriverEnded(at=now(), number=self.number, closed=closed))
            self._journal.close()
        if self._journal.problem is not None:
            with recording(self.folder):
                raise self._journal.problem

    def _build(self) -> BuiltTarget | None:
        """Build the target; return None if the run was interrupted before it was up."""
        with self._killing_starts():
            try:
                return self.target.build()
            except Exception:
                if not self.interrupt.is_set():
                    raise
                return None

    @contextlib.contextmanager
    def _killing_starts(self) -> Generator[None]:
        """In the block, kill ranks that are starting once the run is interrupted."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_KILL_POLL):
                if self.interrupt.is_set():
                    kill_ranks([*self._probe.groups], starting=True)

        thread = threading.Thread(target=watch, name="chaos-interrupt", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _check_ranks(self, built: BuiltTarget) -> None:
        """Refuse a run in which no fault, or not the given ones, could be injected."""
        executor = built.executor
        if executor is None:
            return  # what a supervisor starts may still be coming
        groups = [each for each in self._probe.groups if each.spec.name == executor.name]
        if not groups:
            remedy = 'build it in the factory, with processes (not launch="inline")'
            what = f"returned an executor that cannot be observed: {remedy}"
            raise SpecError("target", self.target.name, what)
        size = executor.world_size
        for fault in self.plan.planned:
            if refusal := FAULTS[fault.fault].refusal_of(groups[0].spec.cluster):
                raise refusal
            if is_rank(fault.target) and int(fault.target) >= size:
                remedy = f"there is no such rank: {self.target.name} has {size}, from 0 on"
                raise SpecError("target", fault.target, remedy)

    # --- faults and traffic -------------------------------------------------------------

    def _serve(self, built: BuiltTarget) -> None:
        plan = self.plan
        seeds = [f"{plan.seed}/{self.number}/{i}" for i in range(plan.callers)]
        callers = Callers(
            lambda: getattr(self._built, "handle", None),
            built.traffic or partial(make_calls, timeout=plan.call_timeout),
            [random.Random(seed) for seed in seeds],  # noqa: S311  # reproducible, not secret
            self._journal,
            frozenset(fault.fault for fault in plan.planned),
        )
        began = time.monotonic() - self.offset
        callers.start()
        is_cut = False
        try:
            for fault in plan.planned:
                if fault.at < self.offset:
                    continue
                self._wait_until(began, fault.at)
                if self.interrupt.is_set():
                    break
                self._injected += 1
                self._nemesis.inject(fault)
            self._wait_until(began, plan.duration)
        except KeyboardInterrupt:
            is_cut = True
            raise
        finally:
            callers.stop()
            self._nemesis.stop()
            if not is_cut:
                self._check_steady_state(callers, time.monotonic() + plan.recovery_limit)

    def _wait_until(self, began: float, at: float) -> None:
        """Wait for that moment of the run; build a group that has given up again."""
        while not self.interrupt.is_set():
            self._build_again()
            self._nemesis.force_restarts()
            self._look()
            gone = time.monotonic() - began
            self._report(gone)
            if gone >= at:
                return
            self.interrupt.wait(min(_LOOK, at - gone))

    def _build_again(self) -> None:
        built = self._built
        if built is not None:
            if not built.is_over:
                return
            self._built = None
            built.close()
        try:
            self._built = self._build()
        except PhalanxError as error:  # its start may meet a fault as well: the next look tries
            self._build_error = error

    def _report(self, seconds: float) -> None:
        if self.on_progress is None:
            return
        views = [group.shared.view for group in self._probe.groups]
        self.on_progress(
            Progress(
                seconds=min(seconds, self.plan.duration),
                duration=self.plan.duration,
                injected=self._injected,
                planned=len(self.plan.planned),
                calls=dict(self._probe.outcomes),
                restarts=sum(view.restarts for view in views),
                state=str(views[-1].phase) if views else "starting",
            )
        )

    # --- the steady state ---------------------------------------------------------------

    def _check_steady_state(self, callers: Callers, deadline: float) -> None:
        """Wait for calls in progress, and check that every group serves."""
        self._wait(lambda: not callers.waiting(), deadline)
        self._check_built(deadline)
        waiting = callers.waiting()
        latest = {group.spec.name: group for group in self._probe.groups}
        for group in latest.values():
            checked = self._checked(group, deadline, waiting)
            if checked.ok or not self.interrupt.is_set():
                self._journal.write(checked)

    def _check_built(self, deadline: float) -> None:
        """Build a group that has given up again, if a fault has prevented that until now."""
        while self._built is None and time.monotonic() < deadline:
            if self.interrupt.wait(_LOOK):
                return
            self._build_again()
        if self._built is None and not self.interrupt.is_set():
            detail = f"it had given up, and could not be built again: {self._build_error}"
            failed = SteadyStateChecked(at=now(), group=self.target.name, ok=False, detail=detail)
            self._journal.write(failed)

    def _wait(self, holds: Callable[[], bool], deadline: float) -> None:
        """Wait until *holds* does, or for *deadline*; not for long after an interrupt."""
        while not holds() and time.monotonic() < deadline:
            if self.interrupt.is_set():
                deadline = min(deadline, time.monotonic() + _HURRY)
            time.sleep(_POLL)

    def _checked(
        self, group: ObservedGroup, deadline: float, waiting: list[str]
    ) -> SteadyStateChecked:
        self._wait(lambda: group.shared.view.phase in _SETTLED, deadline)
        phase = group.shared.view.phase
        ended = phase in (Phase.CLOSING, Phase.ENDED)
        after = f"{self.plan.recovery_limit:g} s after the last fault"
        if ended:
            detail = ""
        elif waiting:
            detail = f"{', '.join(waiting)} still waited for a result {after}"
        elif phase is not Phase.SERVING:
            detail = f"it was {phase} and not serving {after}"
        else:
            detail = self._ping(group, deadline)
        return SteadyStateChecked(
            at=now(), group=group.name, ok=not detail, ended=ended, detail=detail
        )

    def _ping(self, group: ObservedGroup, deadline: float) -> str:
        """Return what is wrong with *group*, which serves; nothing once every rank answers."""
        executor = None if self._built is None else self._built.executor
        if executor is None or executor.name != group.spec.name:
            return ""
        while not self.interrupt.is_set():
            try:
                executor.check_health(_PING)
            except PhalanxError as error:
                if group.shared.view.phase in (Phase.CLOSING, Phase.ENDED):
                    break  # it has given up meanwhile
                if time.monotonic() >= deadline:
                    return f"a rank did not answer: {error}"
                time.sleep(_POLL)
            else:
                break
        return ""
