"""Whether a history holds what was promised.

Guarantees: pure: the same history gives the same verdict, on any machine; a rule that finds
nothing has looked at every record that concerns it.

Left to others: what each rule says (`call_rules`, `delivery_rules`, `group_rules`); the history
itself (`journal`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from . import call_rules, delivery_rules, group_rules
from .violation import INVARIANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .history import History
    from .violation import Violation

_RULES = (call_rules, delivery_rules, group_rules)
_MOST = 20  # of one rule; one cause may show in thousands of calls

RULES: Mapping[str, Callable[[History], Iterator[Violation]]] = {
    name: next(getattr(rules, name) for rules in _RULES if hasattr(rules, name))
    for name in INVARIANTS
}
"""The rules by name."""


def check(history: History) -> tuple[Violation, ...]:
    """Return what *history* shows that may not happen; shortest evidence first.

    Of each rule the 20 violations with the fewest records are kept.
    """
    violations: list[Violation] = []
    for rule in RULES.values():
        broken = sorted(rule(history), key=lambda each: len(each.records))
        violations += [replace(each, seed=history.seed) for each in broken[:_MOST]]
    return tuple(violations)
