"""The closed vocabularies of a supervision tree, word for word OTP's.

Guarantees: every member's value is the word OTP (or Elixir, for ``dynamic``) uses, so that specs,
logs and TOML trees say the same thing.

Left to others: what the words lead to (`decide`).
"""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """Who is restarted together with a child that failed."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"
    SIMPLE_ONE_FOR_ONE = "simple_one_for_one"
    DYNAMIC = "dynamic"

    @property
    def has_instances(self) -> bool:
        """Whether children are numbered instances that come and go, without an order."""
        return self in (Strategy.SIMPLE_ONE_FOR_ONE, Strategy.DYNAMIC)


class Restart(StrEnum):
    """Which ends of a child lead to its restart: all, the abnormal ones, none."""

    PERMANENT = "permanent"
    TRANSIENT = "transient"
    TEMPORARY = "temporary"


class AutoShutdown(StrEnum):
    """Whether the end of significant children ends their supervisor."""

    NEVER = "never"
    ANY_SIGNIFICANT = "any_significant"
    ALL_SIGNIFICANT = "all_significant"


class ChildType(StrEnum):
    """Whether a child is a leaf of the tree or a supervisor itself."""

    WORKER = "worker"
    SUPERVISOR = "supervisor"
