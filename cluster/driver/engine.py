"""`Engine`: the interface of the part that finds machines and starts a node process on each.

An engine makes no decisions: the driver decides which nodes serve, are lost or replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from phalanx.cluster.link.messages import NodeOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The properties of a cluster that its engine reports.

    Attributes:
        address: This machine's IP address, as the machines of the cluster reach it.
        ranks_per_node: The number of ranks of a node: the configured one, or as many as the GPUs of
            the largest machine allow.
    """

    address: str
    ranks_per_node: int


class EngineEvents(Protocol):
    """Events of an engine about the requested nodes. Thread-safe; nothing here waits."""

    def offered(self, number: int) -> None:
        """There is a machine for that node."""

    def started(self, number: int, key: str) -> None:
        """Its node process runs and has this public key, in ZeroMQ's encoding."""

    def unreached(self, number: int, why: str) -> None:
        """Its node process gets no connection to the driver's side; it keeps trying."""

    def suspect_reported(self, number: int, why: str) -> None:
        """The machine may be lost."""

    def gone(
        self, number: int, why: str, *, swept: bool, counts_against_machine: bool = True
    ) -> None:
        """The machine or the node process has ended; *swept*: so have all its descendants.

        It *counts against the machine*, unless it is the engine itself that has failed.
        """

    def refused(self, address: str, why: str) -> None:
        """A connection to the engine without a valid key was refused."""

    def engine_gone(self, why: str) -> None:
        """What has given the machines is not reached; told once each time."""


class Engine(Protocol):
    """The driver's requests to an engine. Only `open` and `close` wait: never on the loop."""

    def open(self) -> Cluster:
        """Reach the cluster, and say what it is.

        Raises:
            RuntimeFault: it is not reached, or none of its machines will ever do; the message says
                which, and what to do.
        """
        ...

    def reserve(self, number: int, events: EngineEvents) -> None:
        """Find a machine; `EngineEvents.offered` follows."""

    def start(self, number: int, order: NodeOrder) -> None:
        """Start a node process there; `EngineEvents.started` follows, or `EngineEvents.gone`."""

    def release(self, number: int) -> None:
        """End the node process if it is there, what it left, and the reservation. Idempotent."""

    @property
    def is_ending(self) -> bool:
        """Whether all nodes are about to be told as gone: what has started them has ended."""
        ...

    def shortage(self) -> str:
        """Return what there is, for the error that no machine could be had; may be empty."""
        ...

    def close(self) -> None:
        """End what is left of nodes and reservations, and the link to the cluster. Idempotent."""
