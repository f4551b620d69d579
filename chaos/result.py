"""What a run came to: what was done, what became of it, and what of it may not be.

Guarantees: everything in it follows from the history; the same run folder gives the same result.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .call_records import Issued, Settled
from .group_records import GroupEnded, RankDied
from .referee_records import LifeEnded, Missed, Struck
from .violation import INVARIANTS
from .worker_records import Began, Ended

if TYPE_CHECKING:
    from pathlib import Path

    from .history import History
    from .plan import Chaos
    from .violation import Violation

_SHOWN = 5  # violations that are shown in full
_OF_THE_RUN = "_ping"  # the method of `Executor.check_health`, with which a run ends


@dataclass(frozen=True, slots=True)
class FaultSummary:
    """What came of the faults of one kind.

    Attributes:
        done: How many were done.
        missed: How many found nobody, or no moment.
        recoveries: Seconds from each to the next call that its victim ran to the end.
        reasons: Why those were missed, and how many for that, most frequent first.
    """

    fault: str
    done: int
    missed: int
    recoveries: tuple[float, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class ChaosResult:
    """The result of one run.

    Attributes:
        target: What was run.
        plan: What was to be done to it.
        violations: What the history shows that may not be.
        interrupted: Whether it ended before its time, by Ctrl-C.
        record: The folder with its record; None where that was not kept.
    """

    target: str
    plan: Chaos
    history: History
    violations: tuple[Violation, ...]
    interrupted: bool = False
    record: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every invariant held, in a run that could have broken one."""
        return not self.violations and not self.void

    @cached_property
    def void(self) -> str:
        """Why this run shows nothing, whatever held; empty where it shows something."""
        if self.plan.strikes and not any(each.done for each in self.faults):
            if self.interrupted:
                return "it was interrupted before the first of its faults was done"
            return f"none of the faults that were asked for ({len(self.plan.strikes)}) was done"
        if all(issued.method == _OF_THE_RUN for issued in self.history.every(Issued)):
            return "its traffic made no call"
        return ""

    def told(self, count: int) -> tuple[Violation, ...]:
        """Return up to *count* violations to show: one of each rule first, none twice."""
        distinct: dict[tuple[str, str], Violation] = {}
        first: dict[str, Violation] = {}
        for each in self.violations:
            distinct.setdefault((each.invariant, each.message), each)
            first.setdefault(each.invariant, each)
        more = (each for each in distinct.values() if first[each.invariant] is not each)
        chosen = (*first.values(), *more)
        return chosen[:count]

    @cached_property
    def calls(self) -> dict[str, int]:
        """How many calls ended with each outcome."""
        return dict(sorted(Counter(s.outcome for s in self.history.every(Settled)).items()))

    @cached_property
    def restarts(self) -> int:
        """How many deaths that nobody asked for there were."""
        return len(self.history.every(RankDied))

    @cached_property
    def faults(self) -> tuple[FaultSummary, ...]:
        """What came of the faults, by kind."""
        done: dict[str, set[int]] = defaultdict(set)
        missed: dict[str, Counter[str]] = defaultdict(Counter)
        for each in self.history.every(Missed):
            missed[each.fault][each.why] += 1
        times: dict[str, list[float]] = defaultdict(list)
        for struck in self.history.every(Struck):
            if struck.strike not in done[struck.fault]:
                done[struck.fault].add(struck.strike)
                took = self._recovery(struck)
                if took is not None:
                    times[struck.fault].append(took)
        return tuple(
            FaultSummary(
                name,
                len(done[name]),
                missed[name].total(),
                tuple(times[name]),
                tuple(missed[name].most_common()),
            )
            for name in sorted({*done, *missed})
        )

    def _recovery(self, struck: Struck) -> float | None:
        """Return how long *struck*'s victim took to run a call to its end again."""
        if struck.rank is None or struck.incarnation is None:
            return None
        who = (struck.group, struck.rank)
        ends = self._ends.get(who, [])
        for at, incarnation, began in ends[bisect_right(ends, (struck.at, 0, 0.0)) :]:
            # Who lives on has got over it with the next call: the one it was in may have no answer.
            lives_on = not struck.lethal and began >= struck.at
            if incarnation > struck.incarnation or lives_on:
                return at - struck.at
        return None

    @cached_property
    def _ends(self) -> dict[tuple[str, int], list[tuple[float, int, float]]]:
        """When each rank ran a call to its end, in which incarnation, and when it had begun it."""
        begun = {
            (each.group, each.rank, each.incarnation, each.wire, each.call): each.at
            for each in self.history.every(Began)
        }
        ends: dict[tuple[str, int], list[tuple[float, int, float]]] = defaultdict(list)
        for ended in self.history.every(Ended):
            if not ended.error:
                rank = ended.group, ended.rank
                key = *rank, ended.incarnation, ended.wire, ended.call
                ends[rank].append((ended.at, ended.incarnation, begun.get(key, 0.0)))
        return ends

    # --- telling ------------------------------------------------------------------------

    def render(self) -> str:
        """Return the closing table, and the violations if there are any."""
        lines = [self._title(), ""]
        lines += self._table_of_faults()
        for each in self.faults:
            lines += [f"missed     {count} {each.fault}: {why}" for why, count in each.reasons]
        calls = ", ".join(f"{count} {outcome}" for outcome, count in self.calls.items()) or "none"
        runs = len(self.history.every(Began))
        lines += ["", f"calls      {sum(self.calls.values())}: {calls}"]
        lines += [f"runs       {runs} by workers", f"deaths     {self.restarts} unasked"]
        lines += self._given_up()
        lines += ["", *self._table_of_invariants()]
        shown = self.told(_SHOWN)
        for violation in shown:
            lines += ["", violation.render()]
        if len(self.violations) > len(shown):
            lines += ["", f"and {len(self.violations) - len(shown)} more"]
        if self.record is not None:
            lines += ["", f"record     {self.record}"]
        return "\n".join([*lines, "", self._verdict()])

    def _title(self) -> str:
        plan = self.plan
        return f"{self.target}: {plan.duration:g} s, {len(plan.strikes)} faults, seed {plan.seed}"

    def _verdict(self) -> str:
        cut = " (interrupted)" if self.interrupted else ""
        if self.interrupted and not any(life.closed for life in self.history.every(LifeEnded)):
            cut = " (interrupted twice: what was left behind was not looked for)"
        if self.ok:
            return f"ok: every invariant held{cut}"
        if self.void and not self.violations:
            return f"NOTHING SHOWN: {self.void}{cut}"
        broken = sorted({violation.invariant for violation in self.violations})
        return f"VIOLATED: {', '.join(broken)}{cut}; again with --seed {self.plan.seed}"

    def _table_of_faults(self) -> list[str]:
        lines = [f"{'fault':<12}{'done':>6}{'missed':>8}   recovery p50     p99     max"]
        for each in self.faults:
            times = sorted(each.recoveries)
            shown = "        -"
            if times:
                picked = (quantile(times, 0.5), quantile(times, 0.99), times[-1])
                shown = "".join(f"{seconds:>6.2f} s" for seconds in picked)
            lines.append(f"{each.fault:<12}{each.done:>6}{each.missed:>8}   {shown:>27}")
        return lines

    def _given_up(self) -> list[str]:
        """Return how many groups gave up, and how many were built in their drivers after that."""
        ends = [
            (each.at, self.history.groups[each.group].pid)
            for each in self.history.every(GroupEnded)
            if each.cause
        ]
        later = sum(
            any(built.pid == pid and built.at >= at for at, pid in ends)
            for built in self.history.groups.values()
        )
        return [f"groups     {len(ends)} gave up, {later} built after that"] if ends else []

    def _table_of_invariants(self) -> list[str]:
        broken = Counter(violation.invariant for violation in self.violations)
        lines: list[str] = []
        for name, says in INVARIANTS.items():
            state = f"BROKEN {broken[name]}x" if broken[name] else "held"
            lines.append(f"{state:<11}{name:<17}{says}")
        return lines

    def to_json(self) -> str:
        """Return the figures as one JSON object."""
        return json.dumps(
            {
                "target": self.target,
                "seed": self.plan.seed,
                "ok": self.ok,
                "interrupted": self.interrupted,
                "void": self.void,
                "duration": self.plan.duration,
                "calls": self.calls,
                "deaths": self.restarts,
                "faults": [
                    {
                        "fault": each.fault,
                        "done": each.done,
                        "missed": each.missed,
                        "reasons": dict(each.reasons),
                        "recovery_p50": quantile(sorted(each.recoveries), 0.5),
                        "recovery_p99": quantile(sorted(each.recoveries), 0.99),
                        "recovery_max": max(each.recoveries, default=None),
                    }
                    for each in self.faults
                ],
                "violations": [
                    {
                        "invariant": each.invariant,
                        "message": each.message,
                        "records": [record.line() for record in each.records],
                    }
                    for each in self.violations
                ],
            },
            indent=1,
        )


def quantile(ordered: list[float], part: float) -> float | None:
    """Return the value that *part* of *ordered* are not above; None where there are none."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
