"""The part of `recovery` that also measures Ray, xoscar and torchrun, if they are installed.

Elsewhere: the deaths themselves (`deaths`), and the installed peers (`environments`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .harness.stats import of
from .harness.tables import table, time_with_interval
from .kill.scenarios import Fate, Plan, alike, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .harness.venvs import Environments
    from .kill.subject import Outcome

_PEERS = ("phalanx", "ray", "xoscar", "torchrun")
_SCENARIOS = ("in-flight", "idle")


def measure_peers(ranks: int, kills: int, environments: Environments) -> tuple[list[Fate], int]:
    """Kill *kills* ranks of each, at work and idle; return what `measure` does."""
    plan = Plan(ranks=ranks, times=kills, patience=60.0, systems=_PEERS, scenarios=_SCENARIOS)
    return measure(plan, environments)


def peers_text(fates: Sequence[Fate]) -> str:
    """Return a line for each system: the rows of our own table, and what became of the calls."""
    heads = (
        *("from SIGKILL to", "the call in flight has ended", "first call, killed at work"),
        *("first call, killed idle", "what became of the call in flight", "calls that failed"),
    )
    labels = list(dict.fromkeys(fate.system.label for fate in fates))
    rows = [_row([fate for fate in fates if fate.system.label == label]) for label in labels]
    about = (
        "A call in flight takes 2 s on each rank, and the survivors end it before they serve the "
        "next one. Ray and xoscar form no process group; a step of torchrun is an all-reduce in "
        "one, formed anew by restarting every rank."
    )
    return f"### Peers\n\n{about}\n\n{table(heads, rows)}"


def _row(fates: Sequence[Fate]) -> Sequence[str]:
    label = fates[0].system.label
    # One that Ctrl-C has ended is there without the second.
    at_work, idle = (*fates, Fate(fates[0].system, fates[0].scenario))[:2]
    if not at_work.outcomes:
        return (label, at_work.why, "", "", "", "")
    failed = [outcome.failed for each in fates for outcome in each.outcomes]
    return (
        label,
        _time(at_work.outcomes, lambda outcome: outcome.knows) if at_work.system.calls else "",
        _time(at_work.outcomes, lambda outcome: outcome.works),
        _time(idle.outcomes, lambda outcome: outcome.works) if idle.outcomes else idle.why,
        alike(outcome.got for outcome in at_work.outcomes),
        f"{sum(failed)} in {len(failed)} kills",
    )


def _time(outcomes: Iterable[Outcome], what: Callable[[Outcome], float | None]) -> str:
    times = [what(outcome) for outcome in outcomes]
    found = of(each for each in times if each is not None)
    if found is None:
        return "never"
    return time_with_interval(found) + ("; never in some" if None in times else "")
