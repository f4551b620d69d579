"""Events of the nodes of a group, which `Executor.subscribe` delivers."""

from __future__ import annotations

from phalanx.runtime import Event


class NodeJoined(Event, event="node_joined"):
    """A node serves: it may be given ranks.

    Attributes:
        node: Its number among all nodes of the group.
        host: The name of its machine.
    """

    group: str
    node: int
    host: str


class NodeSuspect(Event, event="node_suspect", level="warning"):
    """A node may be gone; its ranks and their calls go on."""

    group: str
    node: int
    host: str
    why: str


class NodeRecovered(Event, event="node_recovered"):
    """A node that was a suspect has been heard."""

    group: str
    node: int
    host: str


class NodeLost(Event, event="node_lost", level="error"):
    """A node is lost for good, and all its ranks with it. They may run until `NodeFenced`."""

    group: str
    node: int
    host: str
    why: str
    ranks: tuple[int, ...]


class NodeFenced(Event, event="node_fenced"):
    """Nothing of a node runs any longer: its ranks may be started elsewhere.

    Attributes:
        why: The evidence.
    """

    group: str
    node: int
    host: str
    why: str


class NodeAwaited(Event, event="node_awaited"):
    """A start of ranks waits for a node, or for the lost one of theirs to be fenced.

    Attributes:
        timeout: Seconds that it waits for a machine; None for no limit.
        level: ``info`` at the first start.
    """

    group: str
    ranks: tuple[int, ...]
    reason: str
    timeout: float | None
    level: str = "warning"


class EngineGone(Event, event="engine_gone", level="error"):
    """What has given the machines is not reached, such as Ray's head. Their ranks go on for now."""

    group: str
    why: str


class NodeQuarantined(Event, event="node_quarantined", level="error"):
    """A machine was lost too often: its node serves again only after a while.

    Attributes:
        seconds: How long that is.
    """

    group: str
    node: int
    host: str
    seconds: float
