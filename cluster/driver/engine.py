"""The seam to an engine: what finds machines, and starts one node process on each.

An engine decides nothing: which node serves, is lost or replaced is the driver's to say. It reports
by `EngineEvents` what has happened, among it the fourth verb of the seam: `gone`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from phalanx.cluster.link.messages import NodeOrder


class EngineEvents(Protocol):
    """What an engine tells of the nodes that it was asked for. Thread-safe; nothing here waits."""

    def offered(self, number: int) -> None:
        """There is a machine for that node."""

    def started(self, number: int, key: str) -> None:
        """Its node process runs and has this public key, in ZeroMQ's encoding."""

    def doubted(self, number: int, why: str) -> None:
        """The machine may be gone."""

    def gone(self, number: int, why: str, *, swept: bool) -> None:
        """The machine or the node process is gone; *swept*: and all that came from it."""


class Engine(Protocol):
    """What the driver asks for. No call waits for what it asks."""

    def reserve(self, number: int, events: EngineEvents) -> None:
        """Find a machine; `EngineEvents.offered` follows."""

    def start(self, number: int, order: NodeOrder) -> None:
        """Start a node process there; `EngineEvents.started` follows, or `EngineEvents.gone`."""

    def release(self, number: int) -> None:
        """End the node process if it is there, what it left, and the reservation. Idempotent."""
