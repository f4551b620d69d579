"""``python -m benchmarks kill``: what becomes of calls and machines when something is killed.

Guarantees: every system meets the same deaths, opened anew for each kind; one that is not
installed, or that breaks, is a row that says so.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arguments import (
    add_json,
    add_peer_env,
    check_writable,
    count,
    give,
    one_of,
    several,
    span,
)
from benchmarks.harness.machine import describe, sentence
from benchmarks.harness.process_group import adopt_orphans
from benchmarks.harness.stats import of
from benchmarks.harness.subprocess_driver import ContestantBroke, link_package
from benchmarks.harness.tables import seconds, table
from benchmarks.harness.venvs import Environments, absent_without

from .subject import Outcome, Victim
from .systems import SYSTEMS, names

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .systems import System

_NUMBERS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")
_SHORT = 110  # characters of a caller's error


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way for something to die.

    Attributes:
        do: Has it die.
        again: Whether one opening serves for several deaths.
        restarts_only: Whether it says anything of a system that starts nothing anew.
    """

    name: str
    title: str
    do: Callable[[Victim], Outcome]
    again: bool = False
    restarts_only: bool = False


SCENARIOS = (
    Scenario("in-flight", "kill -9 of a rank, a call in flight", Victim.kill_in_flight, again=True),
    Scenario("idle", "kill -9 of an idle rank, then a call", Victim.kill_idle, again=True),
    Scenario("stop", "a rank stopped (SIGSTOP), a call in flight", Victim.stop),
    Scenario(
        "crash-loop", "a rank that dies in every start", Victim.crash_loop, restarts_only=True
    ),
    Scenario("driver", "kill -9 of the driver, a call in flight", Victim.kill_driver),
)


@dataclass(slots=True)
class Fate:
    """What one system made of one scenario.

    Attributes:
        left: What was there after it had been closed, or its driver killed.
        why: Where nothing was measured, why.
    """

    system: System
    scenario: Scenario
    version: str = ""
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    left: list[str] = field(default_factory=list[str])
    why: str = ""

    def values(self) -> dict[str, Any]:
        """Return it in types that JSON knows; times in seconds."""
        return {
            "system": self.system.name,
            "setting": self.system.setting,
            "version": self.version,
            "scenario": self.scenario.name,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "left": self.left,
            "not_measured": self.why,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is killed, and how often.

    Attributes:
        patience: Seconds that an answer or a recovery is waited for.
    """

    ranks: int = 4
    times: int = 3
    patience: float = 30.0
    systems: Sequence[str] = ()
    scenarios: Sequence[str] = ()


def measure(plan: Plan, environments: Environments) -> tuple[list[Fate], int]:
    """Return what became of each system in each scenario until Ctrl-C; and the exit code."""
    fates: list[Fate] = []
    try:
        fates.extend(_each(plan, environments))
    except KeyboardInterrupt:
        print("\nended by Ctrl-C; this is what there was", file=sys.stderr)
        return fates, 130
    return fates, 0


def _each(plan: Plan, environments: Environments) -> Iterator[Fate]:
    adopt_orphans()
    for system in SYSTEMS:
        if plan.systems and system.name not in plan.systems:
            continue
        python = environments.python(system.environment)
        for scenario in SCENARIOS:
            if plan.scenarios and scenario.name not in plan.scenarios:
                continue
            fate = Fate(system, scenario)
            if python is None:
                fate.why = absent_without(system.environment)
            elif scenario.restarts_only and not system.restarts:
                fate.why = "starts nothing anew"
            else:
                print(f"{system.label}: {scenario.title}", file=sys.stderr, flush=True)
                _try(fate, python, plan)
            yield fate


def _try(fate: Fate, python: str, plan: Plan) -> None:
    times = plan.times if fate.scenario.again else 1
    with tempfile.TemporaryDirectory(prefix="ph", ignore_cleanup_errors=True) as place:
        link_package(Path(place))
        try:
            with Victim(fate.system, python, Path(place), plan.ranks, plan.patience) as victim:
                fate.version = victim.version
                for _ in range(times):
                    fate.outcomes.append(fate.scenario.do(victim))
                    print(f"    {_brief(fate.outcomes[-1])}", file=sys.stderr, flush=True)
                    if fate.outcomes[-1].works is None:
                        break
                fate.left = victim.close()
        except Exception as error:  # noqa: BLE001  # the other systems go on
            fate.why = f"broke: {error.what if isinstance(error, ContestantBroke) else repr(error)}"
            print(f"{fate.system.label}: {fate.why}", file=sys.stderr, flush=True)


def _brief(outcome: Outcome) -> str:
    """Return *outcome* as one line of progress."""
    times = {"known": outcome.knows, "works": outcome.works, "gone": outcome.gone}
    told = [f"{what} after {seconds(took)}" for what, took in times.items() if took is not None]
    return ", ".join(told or ["no answer"]) + f"; {alike([outcome.got, *outcome.errors])}"


def text(fates: Sequence[Fate], machine: dict[str, Any], plan: Plan) -> str:
    """Return a table for each scenario."""
    parts = [f"{sentence(machine)}. {plan.ranks} ranks; waited for {plan.patience:g} s at most."]
    for scenario in SCENARIOS:
        mine = [fate for fate in fates if fate.scenario == scenario]
        if mine:
            how = _TABLES.get(scenario.name, _CALLS)
            told = table(("system", *how.columns), how.rows(mine))
            parts.append(f"## {scenario.title[0].upper()}{scenario.title[1:]}\n\n{told}")
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Table:
    """The table of a scenario: its columns after the system, and their cells."""

    columns: tuple[str, ...]
    row: Callable[[Fate], tuple[str, ...]]

    def rows(self, fates: Sequence[Fate]) -> list[Sequence[str]]:
        """Return a row for each system; one that has no outcome says why."""
        spare = [""] * (len(self.columns) - 1)
        return [
            (fate.system.label, *(self.row(fate) if fate.outcomes else (fate.why, *spare)))
            for fate in fates
        ]


def _call_row(fate: Fate) -> tuple[str, ...]:
    began = sum(each.began for each in fate.outcomes) / len(fate.outcomes)
    ended = sum(each.ended for each in fate.outcomes) / len(fate.outcomes)
    return (
        _median(each.knows for each in fate.outcomes),
        alike(each.got for each in fate.outcomes),
        _median((each.works for each in fate.outcomes), "never"),
        _failed(fate.outcomes),
        f"{began:.3g} / {ended:.3g}" if began else "",
        fate.why or "; ".join(fate.left) or "nothing",
    )


def _idle_row(fate: Fate) -> tuple[str, ...]:
    return (
        _median((each.works for each in fate.outcomes), "never"),
        _failed(fate.outcomes),
        alike(error for each in fate.outcomes for error in each.errors),
        fate.why or "; ".join(fate.left) or "nothing",
    )


def _loop_row(fate: Fate) -> tuple[str, ...]:
    only = fate.outcomes[0]
    again = "no" if only.works is None else "yes"
    return str(only.starts), alike(only.errors) or "wait", again


def _driver_row(fate: Fate) -> tuple[str, ...]:
    only = fate.outcomes[0]
    gone = "not in 15 s" if only.gone is None else seconds(only.gone)
    return gone, only.got, "; ".join(only.left) or "nothing"


_CALLS = _Table(
    (
        *("the caller knows after", "the caller gets", "works again after", "calls that failed"),
        *("ranks that began / ended it", "left after closing"),
    ),
    _call_row,
)
_TABLES = {
    "idle": _Table(
        ("works again after", "calls that failed", "with", "left after closing"), _idle_row
    ),
    "crash-loop": _Table(
        ("starts in 15 s", "callers meanwhile", "works when starts succeed again"), _loop_row
    ),
    "driver": _Table(("all its processes are gone after", "of", "left behind"), _driver_row),
}


def _median(values: Iterable[float | None], never: str = "") -> str:
    known = list(values)
    found = of(value for value in known if value is not None)
    if found is None:
        return never
    return seconds(found.median) + (f"; {never} in some" if None in known and never else "")


def _failed(outcomes: Sequence[Outcome]) -> str:
    """Return how many calls failed until one succeeded; where none did, how many is our doing."""
    if any(each.works is None for each in outcomes):
        return "all"
    found = of(float(each.failed) for each in outcomes)
    return "" if found is None else f"{found.median:.3g}"


def alike(texts: Iterable[str]) -> str:
    """Return *texts* so that they fit a cell: those that differ in numbers only once."""
    first: dict[str, str] = {}
    for text in texts:
        plain = text.replace("|", "/")
        short = plain if len(plain) <= _SHORT else plain[: _SHORT - 3].rstrip() + "..."
        first.setdefault(_NUMBERS.sub("#", short), short)
    shown = [text for text in first.values() if text]
    more = f"; and {len(shown) - 2} other kinds" if len(shown) > 2 else ""
    return "; ".join(shown[:2]) + more


def values(fates: Sequence[Fate], machine: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return everything in types that JSON knows; times in seconds."""
    return {
        "machine": machine,
        "plan": asdict(plan),
        "fates": [fate.values() for fate in fates],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    whole = Plan()
    systems, known = names(), [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--ranks", type=count, default=whole.ranks)
    parser.add_argument("--times", type=count, default=whole.times, help="a rank is killed")
    parser.add_argument("--patience", type=span, default=whole.patience, metavar="SECONDS")
    for option, each in (("--only", systems), ("--scenarios", known)):
        kind = several(one_of(each))
        parser.add_argument(option, type=kind, default=[], metavar=",".join(each))
    add_peer_env(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Kill, and print what became of it; with Ctrl-C, of what was killed by then."""
    check_writable("json", arguments.json)
    plan = Plan(
        ranks=arguments.ranks,
        times=arguments.times,
        patience=arguments.patience,
        systems=arguments.only,
        scenarios=arguments.scenarios,
    )
    machine = describe()
    fates, code = measure(plan, Environments(arguments.peer_env))
    give(arguments, values(fates, machine, plan), text(fates, machine, plan))
    return code
