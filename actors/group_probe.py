"""What looks on at one group, in the driver, where faults are injected.

Left to others: the points that are passed, and who looks on at all groups (`probe`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .calls import CallTap


class GroupProbe(Protocol):
    """What looks on at one group, in the driver."""

    def tap(
        self, name: str, method: Any, *, shape: str, rank: int | None, is_stream: bool
    ) -> CallTap:
        """Return what looks on at a call that is being made."""
        ...

    def witness(self, rank: int, incarnation: int) -> bytes:
        """Return the pickled `Witness` for a worker that is being started."""
        ...

    def happened(self, event: Any) -> None:
        """The group publishes *event*."""
        ...

    def planned(self, ranks: frozenset[int], size: int | None) -> None:
        """A restart of *ranks*, or a resize, begins."""
        ...

    def not_started(self, ranks: tuple[tuple[int, int], ...], reason: str) -> None:
        """These (rank, incarnation) could not be given a process."""
        ...

    def restarting(self, ranks: tuple[tuple[int, int], ...]) -> None:
        """These (rank, incarnation) have just been given one; *restarting* is passed."""
        ...

    def closing(self) -> None:
        """The ranks have just been told to stop for good; *closing* is passed."""
        ...
