"""What the ranks of one epoch have in common.

Guarantees: ranks of two epochs never share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.runtime import Rendezvous

    from .layout import Layout


@dataclass(frozen=True, slots=True)
class Formation:
    """What the ranks of one epoch have in common.

    Attributes:
        coordinates: Whether a layout was asked for, so that places in it are shown.
        trace: The span that the start of the ranks belongs to; empty for none.
    """

    epoch: int
    layout: Layout
    coordinates: bool
    rendezvous: Rendezvous | None
    trace: Mapping[str, str]
