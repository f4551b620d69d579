"""`System`: what is killed, in `kill` and in ``recovery --peers``, each in every setting it has.

Guarantees: a system that is not installed is in the list all the same, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class System:
    """One system in one setting.

    Attributes:
        name: As in tables and on the command line.
        module: The contestant that drives it.
        variant: The argument of that.
        setting: The variant in words of that system.
        environment: The peer whose environment it needs; None runs in ours.
        restarts: Whether it starts anew what has died.
        calls: Whether it has calls at all.
        most_ranks: More are not tried: each costs a minute of start.
    """

    name: str
    module: str
    variant: str
    setting: str
    environment: str | None = None
    restarts: bool = True
    calls: bool = True
    most_ranks: int | None = None

    @property
    def label(self) -> str:
        """Its name and setting."""
        return f"{self.name}, {self.setting}" if self.setting else self.name


SYSTEMS = (
    System("phalanx", "phalanx", "fail", "retries=0"),
    System("phalanx", "phalanx", "retry", "retries=10"),
    System("phalanx", "phalanx", "retry, a spare", "retry, standby=1"),
    System("ray", "ray", "no restart", "max_restarts=0", "ray", restarts=False),
    System("ray", "ray", "restart", "max_restarts=-1", "ray"),
    System("ray", "ray", "restart, retry", "max_restarts=-1, max_task_retries=-1", "ray"),
    System("xoscar", "xoscar", "no recovery", "auto_recover=False", "xoscar", restarts=False),
    System("xoscar", "xoscar", "recover actors", 'auto_recover="actor"', "xoscar"),
    System("xoscar", "xoscar", "recover processes", 'auto_recover="process"', "xoscar"),
    System("monarch", "monarch", "", "as it comes", "monarch", restarts=False),
    System("monarch", "monarch", "hook", "unhandled_fault_hook set", "monarch", restarts=False),
    System("torchrun", "torchrun", "plain", "--max-restarts=10", calls=False),
    System(
        "torchrun",
        "torchrun",
        "a store per restart",
        "the same, and a store prefix per restart, by hand",
        calls=False,
    ),
    System(
        "vllm-executor",
        "vllm-executor",
        "",
        "MultiprocExecutor",
        "vllm",
        restarts=False,
        most_ranks=2,
    ),
)


def names(systems: Sequence[System] = SYSTEMS) -> list[str]:
    """Return the names, each once."""
    return list(dict.fromkeys(system.name for system in systems))
