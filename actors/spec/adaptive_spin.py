"""How long who waits for a message looks for it before it sleeps in the kernel.

To be woken takes longer than a small message itself where the processor has gone idle meanwhile,
or another process has it. Who looks again and again is spared that, at the price of the processor:
so by default it happens only where there is one for each process of the group and one for the
driver, and only for a moment.

Guarantees: it is bounded, so at rest nobody looks; what is not wished for does not happen. Ranks
that outnumber the processors never look, as they would take them from each other: a caller that
looks gives way to them.

Left to others: looking (`reading`, `runtime.streams`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import usable_processors
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from phalanx.runtime import Zmq

USUAL = 50e-6
"""Seconds; some three times what waking a process takes."""

LONGEST = 1.0
"""Seconds that may be asked for."""


@dataclass(frozen=True, slots=True)
class Looks:
    """Seconds for which each side looks; 0.0 sleeps at once."""

    caller: float
    ranks: float


@dataclass(frozen=True, slots=True)
class Spinning:
    """What an executor was built with.

    Attributes:
        seconds: How long to look; None decides by the processors there are.
        possible: Whether the ranks are where looking helps.
    """

    seconds: float | None = None
    possible: bool = True

    def of(self, ranks: int) -> Looks:
        """Return what it comes to in a group of so many *ranks*."""
        processors = usable_processors()
        if self.seconds is None:
            usual = USUAL if self.possible and processors >= ranks + 1 else 0.0
            return Looks(usual, usual)
        return Looks(self.seconds, self.seconds if ranks <= max(1, processors) else 0.0)


def check_spin(spin: object, transport: Zmq | None) -> Spinning:
    """Return what *spin* asks for.

    Raises:
        SpecError: it makes no sense.
    """
    if spin is None:
        return Spinning(None, transport is None)
    if isinstance(spin, bool) or not isinstance(spin, int | float) or not math.isfinite(spin):
        raise SpecError("spin", spin, "give a number of seconds, or None")
    if not 0 <= spin <= LONGEST:
        raise SpecError("spin", spin, f"give seconds from 0 to {LONGEST:g}; 0.0001 is a long time")
    if spin and transport is not None:
        raise SpecError("spin", spin, 'needs transport="local": others wait in between')
    return Spinning(float(spin), transport is None)
