"""`ChaosResult`: the events of a run, their outcomes, and the invariants that it broke.

Everything follows from the history: the same folder gives the same result.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from phalanx.chaos.checker.checker import INVARIANTS
from phalanx.chaos.history import events as ev

if TYPE_CHECKING:
    from pathlib import Path

    from phalanx.chaos.checker.checker import Violation
    from phalanx.chaos.config import Chaos
    from phalanx.chaos.history.history import History

_SHOWN = 5  # violations that are shown in full
_OF_THE_RUN = "_ping"  # the method of `Executor.check_health`, with which a run ends


@dataclass(frozen=True, slots=True)
class FaultSummary:
    """The results of the faults of one kind.

    Attributes:
        done: How many were injected.
        missed: How many could not be injected.
        recoveries: Seconds from each to the next call that its victim ran to the end, ascending.
        reasons: Why faults were missed, and how many, most frequent first.
    """

    fault: str
    done: int
    missed: int
    recoveries: tuple[float, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()

    @property
    def recovery(self) -> dict[str, float | None]:
        """The quantiles ``p50``, ``p99`` and ``max`` of the recoveries; None without any."""
        parts, count = {"p50": 0.5, "p99": 0.99, "max": 1.0}, len(self.recoveries)
        places = {name: min(count - 1, int(part * count)) for name, part in parts.items()}
        return {name: self.recoveries[at] if count else None for name, at in places.items()}


@dataclass(frozen=True)
class ChaosResult:
    """The result of one run.

    Attributes:
        target: The name of the target.
        plan: The options of the run.
        violations: Of invariants, in the history.
        interrupted: Whether it ended early.
        record: The folder of its record; None if that was not kept.
    """

    target: str
    plan: Chaos
    history: History
    violations: tuple[Violation, ...]
    interrupted: bool = False
    record: Path | None = None

    @property
    def verdict(self) -> Literal["PASS", "FAIL", "INCONCLUSIVE"]:
        """FAIL if an invariant was broken, INCONCLUSIVE if the run shows nothing, else PASS."""
        return "FAIL" if self.violations else "INCONCLUSIVE" if self.inconclusive else "PASS"

    @property
    def ok(self) -> bool:
        """Whether the verdict is PASS."""
        return self.verdict == "PASS"

    @cached_property
    def inconclusive(self) -> str:
        """Why this run shows nothing, if no invariant was broken; empty if it shows something."""
        if self.plan.planned and not any(each.done for each in self.faults):
            if self.interrupted:
                return "it was interrupted before the first fault was injected"
            return f"none of the {len(self.plan.planned)} faults could be injected"
        if all(issued.method == _OF_THE_RUN for issued in self.history.every(ev.CallIssued)):
            return "its traffic made no call"
        return ""

    def selected(self, count: int) -> tuple[Violation, ...]:
        """Return up to *count* violations: one of each invariant first, and no text twice."""
        distinct: dict[tuple[str, str], Violation] = {}
        first: dict[str, Violation] = {}
        for each in self.violations:
            distinct.setdefault((each.invariant, each.message), each)
            first.setdefault(each.invariant, each)
        more = (each for each in distinct.values() if first[each.invariant] is not each)
        return (*first.values(), *more)[:count]

    @cached_property
    def calls(self) -> dict[str, int]:
        """The number of calls that ended with each outcome."""
        return dict(sorted(Counter(s.outcome for s in self.history.every(ev.CallSettled)).items()))

    @cached_property
    def deaths(self) -> int:
        """The number of exits that were failures."""
        return len(self.history.every(ev.RankDied))

    @cached_property
    def broken(self) -> dict[str, int]:
        """The number of violations of each invariant."""
        return dict(Counter(each.invariant for each in self.violations))

    @cached_property
    def faults(self) -> tuple[FaultSummary, ...]:
        """The results of the faults, by kind."""
        done: dict[str, dict[int, float | None]] = defaultdict(dict)
        for injected in reversed(self.history.every(ev.FaultInjected)):  # the first one counts
            done[injected.fault][injected.number] = self._recovery(injected)
        missed: dict[str, Counter[str]] = defaultdict(Counter)
        for each in self.history.every(ev.FaultMissed):
            missed[each.fault][each.why] += 1
        return tuple(
            FaultSummary(
                name,
                len(done[name]),
                missed[name].total(),
                tuple(sorted(seconds for seconds in done[name].values() if seconds is not None)),
                tuple(missed[name].most_common()),
            )
            for name in sorted({*done, *missed})
        )

    def _recovery(self, injected: ev.FaultInjected) -> float | None:
        """Return the seconds until the victim, or its successor, ran a call to its end again."""
        ends = self._ends.get((injected.group, injected.rank), [])
        for at, incarnation, began in ends[bisect_right(ends, (injected.at, 0, 0.0)) :]:
            # A survivor has recovered with the next call: the present one may have no result.
            survived = not injected.lethal and began >= injected.at
            if incarnation > (injected.incarnation or 0) or survived:
                return at - injected.at
        return None

    @cached_property
    def _ends(self) -> dict[tuple[str, int | None], list[tuple[float, int, float]]]:
        """When each rank ran a call to its end, in which incarnation, and when that had begun."""
        begun = {(e.worker, e.wire, e.call): e.at for e in self.history.every(ev.CallBegan)}
        ends: dict[tuple[str, int | None], list[tuple[float, int, float]]] = defaultdict(list)
        for ended in self.history.every(ev.CallEnded):
            if not ended.error:
                began = begun.get((ended.worker, ended.wire, ended.call), 0.0)
                ends[ended.group, ended.rank].append((ended.at, ended.incarnation, began))
        return ends

    # --- text and JSON ------------------------------------------------------------------

    def render(self) -> str:
        """Return the closing table, and the violations if there are any."""
        plan, calls = self.plan, self.calls
        lines = [
            f"{self.target}: {plan.duration:g} s, {len(plan.planned)} faults, seed {plan.seed}"
        ]
        lines += ["", f"{'fault':<12}{'done':>6}{'missed':>8}   recovery p50     p99     max"]
        for each in self.faults:
            times = (t for t in each.recovery.values() if t is not None)
            took = "".join(f"{seconds:>6.2f} s" for seconds in times) or "-"
            lines.append(f"{each.fault:<12}{each.done:>6}{each.missed:>8}   {took:>27}")
        for each in self.faults:
            lines += [f"missed     {count} {each.fault}: {why}" for why, count in each.reasons]
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in calls.items()) or "none"
        lines += ["", f"calls      {sum(calls.values())}: {outcomes}"]
        lines += [f"runs       {len(self.history.every(ev.CallBegan))} by workers"]
        ended = sum(bool(each.cause) for each in self.history.every(ev.GroupEnded))
        lines += [f"groups     {len(self.history.groups)} built, {ended} gave up"]
        lines += [f"deaths     {self.deaths}", ""]
        for name, says in INVARIANTS.items():
            state = f"BROKEN {self.broken[name]}x" if name in self.broken else "held"
            lines.append(f"{state:<11}{name:<17}{says}")
        shown = self.selected(_SHOWN)
        for violation in shown:
            lines += ["", violation.render()]
        if len(self.violations) > len(shown):
            lines += ["", f"and {len(self.violations) - len(shown)} more"]
        if self.record is not None:
            lines += ["", f"record     {self.record}"]
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """Return the verdict and its reason, in one line."""
        cut = " (interrupted)" if self.interrupted else ""
        if self.interrupted and not any(e.closed for e in self.history.every(ev.DriverEnded)):
            cut = " (interrupted twice: leaks were not searched for)"
        why = self.inconclusive or "every invariant held"
        if self.violations:
            seed = self.plan.drawn_from
            again = "--schedule" if seed is None else f"--seed {seed}"
            why = f"{', '.join(sorted(self.broken))}; reproduce with {again}"
        return f"{self.verdict}: {why}{cut}"

    def to_json(self) -> str:
        """Return the figures as one JSON object."""
        names = ("target", "verdict", "ok", "interrupted", "inconclusive", "calls", "deaths")
        figures: dict[str, Any] = {name: getattr(self, name) for name in names}
        figures |= {"seed": self.plan.seed, "duration": self.plan.duration}
        figures["faults"] = [
            {name: getattr(each, name) for name in ("fault", "done", "missed")}
            | {"reasons": dict(each.reasons)}
            | {f"recovery_{name}": time for name, time in each.recovery.items()}
            for each in self.faults
        ]
        figures["violations"] = [
            {"invariant": v.invariant, "message": v.message, "events": [e.line() for e in v.events]}
            for v in self.violations
        ]
        return json.dumps(figures, indent=1)
