"""Decisions about the nodes of one group: requests, service, loss, fencing and quarantine.

- Each function takes the nodes and an event, and returns the nodes after it and its actions,
  in order. Times are seconds on one monotonic clock, given with each event.
- A node that is lost never comes back, and its beats are not answered. Its ranks are lost
  with it, as one event; they may be started elsewhere when it is *fenced*: when it is certain that
  nothing of it runs. The last message of the node or of its starter shows that, or a new node on
  the same machine, which ends leftover processes before it greets; or else the end of its lease.
- Silence of a few beats, or a doubt of its starter, makes a node a suspect: its ranks and
  their calls continue, and nothing is started.
- A lost node is replaced at once: there are always as many as are wanted, if there are machines.
- A node that begins and does not greet is replaced too, until several in a row have failed.
- A machine whose nodes were lost twice in `NodeLimits.quarantine` seconds is quarantined. It stays
  reserved meanwhile, or the same machine would be given again. Losses of all nodes that a helper
  beside the driver has caused do not count against machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from .lease import over_at

BEATS_PER_LEASE = 60
"""Number of beats that a node sends in the time of its lease."""

_QUIET = 0.25  # of a lease without a beat, after which a node is a suspect
_LOSSES = 2  # of one machine, after which it is put aside
_NOT_WANTED = "not wanted any longer"
_FAILURES = 3  # to join, in a row, after which no other machine is requested


class NodeState(StrEnum):
    """The state of a node."""

    ASKED = "asked"  # for a machine
    JOINING = "joining"  # on a machine, which has not greeted
    UP = "up"
    SUSPECT = "suspect"  # may be gone; what it runs goes on
    LOST = "lost"  # for good; may still run something
    ASIDE = "aside"  # on a machine that was lost too often
    LEAVING = "leaving"  # asked to end


HELD = frozenset({NodeState.UP, NodeState.SUSPECT})
"""The states in which a node has its ranks."""


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Limits in seconds.

    Attributes:
        lease: Silence after which a node is lost, and what its lease lasts.
        wait: For a machine; ``math.inf`` for no limit.
        join: From a machine to the greeting of its node.
        leave: For a node that is to end.
        quarantine: The time in which two losses put a machine aside, and how long that lasts.
    """

    lease: float = 10.0
    wait: float = 600.0
    join: float = 60.0
    leave: float = 30.0
    quarantine: float = 600.0

    @property
    def quiet(self) -> float:
        """Silence after which a node is a suspect."""
        return self.lease * _QUIET


@dataclass(frozen=True, slots=True)
class AskForNode:
    """Ask for a machine with a node on it, to be known by *number*."""

    number: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The node serves: it may be given ranks."""

    number: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """The node may be gone."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The node was a suspect, and has been heard."""

    number: int


@dataclass(frozen=True, slots=True)
class Lose:
    """All ranks of the node are lost, of this one cause; answer it no more, and say when you did.

    The time at which the last answer left is for `answers_ended`.
    """

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """Nothing of the node runs: its ranks may be started elsewhere, and its machine given back."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End the node, if it is there, and give its machine back."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class PutAside:
    """Keep the machine of the node and use it for nothing, until *until*."""

    number: int
    until: float


@dataclass(frozen=True, slots=True)
class NoNode:
    """No machine could be had in time, or none that fits."""

    why: str


NodeAction = AskForNode | Admit | Suspect | Recovered | Lose | Fenced | Dismiss | PutAside | NoNode


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        since: When it entered its state; ``math.inf`` if it was requested and did not come in time.
        machine: The identity of its machine until the next boot; empty before the greeting.
        slot: Its place there, among those of nodes beside it.
        last_received_at: When its last message arrived.
        answered_at: When the last answer to it left, once none follows; None before.
        counts_against_machine: False if it was lost with others, by a cause outside of them.
    """

    number: int
    state: NodeState
    since: float
    machine: str = ""
    slot: str = ""
    last_received_at: float = 0.0
    answered_at: float | None = None
    counts_against_machine: bool = True


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of one group; a new one has none, and wants *wanted*, spares included.

    Attributes:
        asked: The number of nodes ever requested.
        losses: The machines that were lost, and when, within `NodeLimits.quarantine`.
        failures: How many nodes in a row have begun on a machine and not greeted.
        have_greeted: Whether any node ever has.
    """

    wanted: int
    limits: NodeLimits = field(default_factory=NodeLimits)
    nodes: tuple[Node, ...] = ()
    asked: int = 0
    losses: tuple[tuple[str, float], ...] = ()
    failures: int = 0
    have_greeted: bool = False

    def find(self, number: int, *states: NodeState) -> Node | None:
        """Return the node of that *number* if it is in one of *states*; of none, in any."""
        for node in self.nodes:
            if node.number == number and (not states or node.state in states):
                return node
        return None

    def due(self) -> float:
        """Return when `time_passed` is to be called next; ``math.inf`` for never."""
        return min((self.due_of(node) for node in self.nodes), default=math.inf)

    def due_of(self, node: Node) -> float:
        """Return when something follows for *node* from the time alone."""
        limits = self.limits
        match node.state:
            case NodeState.ASKED:
                return node.since + limits.wait
            case NodeState.JOINING:
                return node.since + limits.join
            case NodeState.UP:
                return node.last_received_at + limits.quiet
            case NodeState.SUSPECT:
                return node.last_received_at + limits.lease
            case NodeState.LOST:
                last = node.answered_at
                return math.inf if last is None else over_at(last, limits.lease)
            case NodeState.ASIDE:
                return node.since + limits.quarantine
            case NodeState.LEAVING:
                return node.since + limits.leave

    def with_(self, node: Node) -> Nodes:
        """Return the nodes with *node* in place of the one of its number."""
        return replace(
            self, nodes=tuple(node if each.number == node.number else each for each in self.nodes)
        )

    def without(self, number: int) -> Nodes:
        """Return the nodes without that one."""
        return replace(self, nodes=tuple(each for each in self.nodes if each.number != number))


NodeDecision: TypeAlias = tuple[Nodes, tuple[NodeAction, ...]]


def want(nodes: Nodes, number: int, at: float, *, begins: bool = False) -> NodeDecision:
    """Have *number* nodes from now on: ask for those that are missing; `leave` ends others.

    Where a wait for them *begins*, so does that for all that have been asked for before. Those that
    are too many are asked for no longer.
    """
    for node in nodes.nodes:
        if node.state is NodeState.ASKED and (begins or node.since == math.inf):
            nodes = nodes.with_(replace(node, since=at))
    there = sum(each.state in HELD or each.state is NodeState.JOINING for each in nodes.nodes)
    asked = [each.number for each in nodes.nodes if each.state is NodeState.ASKED]
    surplus = asked[max(0, number - there) :]
    for each in surplus:
        nodes = nodes.without(each)
    actions = tuple(Dismiss(each, _NOT_WANTED) for each in surplus)
    return _complete(replace(nodes, wanted=number), at, actions)


def offered(nodes: Nodes, number: int, at: float) -> NodeDecision:
    """Return what follows when there is a machine for a node, which begins on it."""
    node = nodes.find(number, NodeState.ASKED)
    if node is None:
        return nodes, (Dismiss(number, _NOT_WANTED),)
    return nodes.with_(replace(node, state=NodeState.JOINING, since=at)), ()


def greeted(nodes: Nodes, number: int, machine: str, at: float, slot: str = "") -> NodeDecision:
    """Return what follows when a node has connected, and has nothing against serving.

    All earlier processes in that *slot* of its *machine* have ended.
    """
    node = nodes.find(number, NodeState.JOINING)
    if node is None:
        return nodes, (Dismiss(number, _NOT_WANTED),)
    nodes = replace(nodes, failures=0, have_greeted=True)
    actions = tuple[NodeAction, ...]()
    for before in nodes.nodes:
        place = (before.machine, before.slot)
        if place == (machine, slot) and before.state is NodeState.LOST:
            nodes = nodes.without(before.number)
            actions += (Fenced(before.number, "a new node on its machine has ended its processes"),)
    node = replace(node, machine=machine, slot=slot, last_received_at=at, since=at)
    losses = [lost for name, lost in nodes.losses if name == machine]
    if len(losses) >= _LOSSES and losses[-1] + nodes.limits.quarantine > at:
        node = replace(node, state=NodeState.ASIDE)
        put_aside = PutAside(number, at + nodes.limits.quarantine)
        return _complete(nodes.with_(node), at, (*actions, put_aside))
    return nodes.with_(replace(node, state=NodeState.UP)), (*actions, Admit(number))


def unfit(nodes: Nodes, number: int, why: str) -> NodeDecision:
    """Return what follows when a node cannot serve: another would have the same fault."""
    if nodes.find(number) is None:
        return nodes, ()
    return nodes.without(number), (Dismiss(number, why), NoNode(why))


def unreached(nodes: Nodes, number: int, why: str, at: float) -> NodeDecision:
    """Return what follows when a node that begins does not reach the driver's side.

    If none ever has, another would have the same fault. Else the fault may be its machine's.
    """
    if nodes.find(number, NodeState.JOINING) is None:
        return nodes, ()
    return _not_joined(nodes, number, why, at) if nodes.have_greeted else unfit(nodes, number, why)


def beat_received(nodes: Nodes, number: int, at: float) -> NodeDecision:
    """Return what follows when a beat of a node has been heard."""
    node = nodes.find(number, *HELD, NodeState.ASIDE)
    if node is None:
        return nodes, ()
    was, node = node.state, replace(node, last_received_at=at)
    if was is not NodeState.SUSPECT:
        return nodes.with_(node), ()
    return nodes.with_(replace(node, state=NodeState.UP, since=at)), (Recovered(number),)


def suspect_reported(nodes: Nodes, number: int, why: str, at: float) -> NodeDecision:
    """Return what follows when a node may be gone, for what started it doubts it, say."""
    node = nodes.find(number, NodeState.UP)
    if node is None:
        return nodes, ()
    node = replace(node, state=NodeState.SUSPECT, since=at)
    return nodes.with_(node), (Suspect(number, why),)


def gone(
    nodes: Nodes, number: int, why: str, at: float, *, counts_against_machine: bool = True
) -> NodeDecision:
    """Return what follows when a node is certainly not there: its control link is closed, say.

    Its machine may be put aside for that, if it *counts against the machine*. Otherwise a node that
    begins is not counted as one that has not joined, either.
    """
    node = nodes.find(number)
    if node is None or node.state is NodeState.LOST:
        return nodes, ()
    if node.state in HELD:
        return _lose(nodes, node, why, at, counts_against_machine=counts_against_machine)
    if node.state is NodeState.LEAVING:  # what it ran may go on until its lease is over
        return nodes.with_(replace(node, state=NodeState.LOST, since=at)), (Lose(number, why),)
    if node.state is NodeState.JOINING and counts_against_machine:
        return _not_joined(nodes, number, why, at)
    # The wait for a machine goes on with the node that is asked for in its place.
    since = node.since if node.state is NodeState.ASKED else at
    return _complete(nodes.without(number), since, (Dismiss(number, why),))


def answers_ended(nodes: Nodes, number: int, last: float) -> NodeDecision:
    """Note that the last answer to a lost node left at *last*, from which its lease runs."""
    node = nodes.find(number, NodeState.LOST)
    return (nodes if node is None else nodes.with_(replace(node, answered_at=last))), ()


def ended(nodes: Nodes, number: int, why: str, at: float) -> NodeDecision:
    """Return the nodes and actions when it is certain, by *why*, that nothing of a node runs."""
    node = nodes.find(number)
    if node is None:
        return nodes, ()
    actions = tuple[NodeAction, ...]()
    if node.state in HELD:
        nodes, actions = _lose(nodes, node, why, at)
    return _complete(nodes.without(number), at, (*actions, Fenced(number, why)))


def leave(nodes: Nodes, number: int, at: float) -> NodeDecision:
    """End a node in good order: it has no ranks, or they have been stopped."""
    node = nodes.find(number)
    if node is None or node.state in (NodeState.LOST, NodeState.LEAVING):
        return nodes, ()
    dismiss = Dismiss(number, _NOT_WANTED)
    if node.state in (NodeState.ASKED, NodeState.JOINING):
        return nodes.without(number), (dismiss,)
    return nodes.with_(replace(node, state=NodeState.LEAVING, since=at)), (dismiss,)


def time_passed(nodes: Nodes, at: float) -> NodeDecision:
    """Return what follows from the time alone; tell first what was heard before *at*."""
    actions = tuple[NodeAction, ...]()
    for node in nodes.nodes:
        if nodes.due_of(node) <= at:
            nodes, more = _overdue(nodes, node, at)
            actions += more
    return nodes, tuple(dict.fromkeys(actions))  # several may want a machine, for one reason


def _overdue(nodes: Nodes, node: Node, at: float) -> NodeDecision:
    limits, number, silence = nodes.limits, node.number, at - node.last_received_at
    match node.state:
        case NodeState.ASKED:
            # The request stays, as a spare may come late. Reported once until the need changes.
            why = f"no machine in {limits.wait:g} s"
            return nodes.with_(replace(node, since=math.inf)), (NoNode(why),)
        case NodeState.JOINING:
            return _not_joined(nodes, number, f"its node has not greeted in {limits.join:g} s", at)
        case NodeState.UP:
            return suspect_reported(nodes, number, f"silent for {silence:.1f} s", at)
        case NodeState.SUSPECT:
            return _lose(nodes, node, f"silent for {silence:.1f} s", at)
        case NodeState.LOST:
            return nodes.without(number), (Fenced(number, "its lease is over"),)
        case NodeState.ASIDE if silence >= limits.lease:  # it was not looked at meanwhile
            return _lose(nodes, node, f"silent for {silence:.1f} s", at)
        case NodeState.ASIDE:
            node = replace(node, state=NodeState.UP, since=at)
            return nodes.with_(node), (Admit(number),)
        case NodeState.LEAVING:
            why = f"has not ended in {limits.leave:g} s"
            node = replace(node, state=NodeState.LOST, since=at)
            return nodes.with_(node), (Lose(number, why),)


def _not_joined(nodes: Nodes, number: int, why: str, at: float) -> NodeDecision:
    nodes = replace(nodes.without(number), failures=nodes.failures + 1)
    if nodes.failures < _FAILURES:
        return _complete(nodes, at, (Dismiss(number, why),))
    why = f"{nodes.failures} nodes in a row have not joined; the last of them: {why}"
    return nodes, (Dismiss(number, why), NoNode(why))


def _lose(
    nodes: Nodes, node: Node, why: str, at: float, *, counts_against_machine: bool = True
) -> NodeDecision:
    since = at - nodes.limits.quarantine
    losses = tuple(each for each in nodes.losses if each[1] > since)
    nodes = replace(nodes, losses=(*losses, *[(node.machine, at)] * counts_against_machine))
    lost = replace(
        node, state=NodeState.LOST, since=at, counts_against_machine=counts_against_machine
    )
    return _complete(nodes.with_(lost), at, (Lose(node.number, why),))


def _complete(nodes: Nodes, at: float, actions: tuple[NodeAction, ...] = ()) -> NodeDecision:
    """Ask for as many nodes as are missing."""
    there = sum(
        node.state in HELD or node.state in (NodeState.ASKED, NodeState.JOINING)
        for node in nodes.nodes
    )
    numbers = range(nodes.asked, nodes.asked + max(0, nodes.wanted - there))
    new = tuple(Node(number, NodeState.ASKED, at) for number in numbers)
    nodes = replace(nodes, nodes=(*nodes.nodes, *new), asked=numbers.stop)
    return nodes, (*actions, *map(AskForNode, numbers))
