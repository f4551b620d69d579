"""Options of a cluster that are common to all engines; checked when they are built."""

from __future__ import annotations

import ipaddress
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.supervision import SpecError, check_count, check_limit, check_number

if TYPE_CHECKING:
    from phalanx.cluster.driver.engine import Engine
    from phalanx.runtime import EventLoop

_LEAST_TIMEOUT = 0.5  # seconds, of which a sixtieth is the interval of beats
_LONGEST_TIMEOUT = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(ABC):
    """The machines of a group whose ranks live on a cluster. A subclass for each engine.

    Attributes:
        ranks_per_node: How many ranks one machine holds. None is what the GPUs of the largest
            machine allow; without GPUs it has to be given.
        spare_nodes: Machines that are reserved beyond those that the ranks need, with a node on
            each, for the ranks of one that is lost.
        node_timeout: Seconds of silence after which a machine is lost. Its ranks end by themselves
            in that time; about 1.2 seconds later they may be started elsewhere.
        node_wait: Seconds that a start or a restart waits for a machine; None for no limit.
        bind: The IP address of this machine on which the driver's side listens for the nodes. None
            is the one by which the cluster knows this machine; no other is listened on.
    """

    ranks_per_node: int | None = None
    spare_nodes: int = 0
    node_timeout: float = 10.0
    node_wait: float | None = 600.0
    bind: str | None = None

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None:
            check_count("cluster.ranks_per_node", self.ranks_per_node)
        check_count("cluster.spare_nodes", self.spare_nodes, 0)
        check_number("cluster.node_timeout", self.node_timeout, _LEAST_TIMEOUT, _LONGEST_TIMEOUT)
        check_limit("cluster.node_wait", self.node_wait)
        if self.bind is not None:
            _check_address("cluster.bind", self.bind)

    @abstractmethod
    def engine(self, loop: EventLoop, *, gpus_per_rank: float) -> Engine:
        """Return what finds the machines; nothing is started yet.

        Args:
            loop: Where its events may be taken.
            gpus_per_rank: How many GPUs each rank gets, or which part of one; 0 for none.
        """


def _check_address(field: str, value: object) -> None:
    try:
        address = ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        remedy = "give an IP address of this machine, such as 10.0.0.1"
        raise SpecError(field, value, remedy) from None
    if address.is_unspecified:
        raise SpecError(field, value, "give one address: nodes connect to it")
