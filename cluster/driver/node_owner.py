"""`NodeOwner`: owns the state of one group's nodes, and performs the decisions about them.

- All events are handled on the event loop's thread, one at a time, and so are the listener's calls.
- The clock of the nodes advances only up to the gateway's last report: a driver that was stopped
  first handles the beats that have arrived, then checks limits.
- An engine finds machines and starts a node process on each. It makes no decisions: which nodes
  serve, are lost or replaced is decided here.
- A node that is lost is silenced at the gateway, which reports when the last answer was due. The
  end of its lease is computed from that; only then may its ranks be started elsewhere.
"""

from __future__ import annotations

import math
import uuid
from functools import partial
from typing import TYPE_CHECKING, Protocol

from phalanx.cluster.link.handshake import why_unfit
from phalanx.cluster.link.messages import (
    MACHINE,
    Greeting,
    Launch,
    Leave,
    NodeOrder,
    NotStarted,
    Swept,
)
from phalanx.cluster.nodes import decide
from phalanx.cluster.nodes.decide import (
    HELD,
    Admit,
    AskForNode,
    Dismiss,
    Fenced,
    Lose,
    NodeDecision,
    NodeLimits,
    Nodes,
    NodeState,
    NoNode,
    PutAside,
    Recovered,
    Suspect,
)
from phalanx.supervision import AddressNotReached, NodeRefused, RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.driver.engine import Engine
    from phalanx.cluster.link.messages import Message
    from phalanx.cluster.link.node_gateway import NodeGateway
    from phalanx.runtime import EventLoop, Timer

_PAUSE = 1.0  # seconds that a look may come late before it counts as a pause of this process


class NodeListener(Protocol):
    """Callbacks of the owner about the nodes, on the event loop's thread."""

    def admitted(self, number: int, greeting: Greeting) -> None:
        """The node may be given ranks."""

    def suspected(self, number: int, why: str) -> None:
        """The node may be gone; what it runs goes on."""

    def recovered(self, number: int) -> None:
        """The node was a suspect, and has been heard."""

    def lost(self, number: int, why: str) -> None:
        """All ranks of the node are lost, of this one cause. They may still run."""

    def fenced(self, number: int, why: str) -> None:
        """Nothing of the node runs: its ranks may be started elsewhere."""

    def received(self, number: int, message: Message) -> None:
        """A node that serves has sent a message about its ranks."""

    def refused(self, address: str, why: str) -> None:
        """A connection was refused; reported once for each *why* of a gateway's."""

    def engine_gone(self, why: str) -> None:
        """What has given the machines is not reached."""

    def put_aside(self, number: int, greeting: Greeting, until: float) -> None:
        """The machine of the node was lost too often: it serves again at *until*."""

    def emptied(self) -> None:
        """No node is left, and none is wanted."""

    def failed(self, error: RuntimeFault) -> None:
        """No machine could be had, or none that fits; one that does not is a `NodeRefused`.

        An `AddressNotReached` is our fault.
        """


class NodeOwner:
    """The nodes of one group.

    It takes the events of gateway and engine: see `GatewayEvents` and `EngineEvents`.

    Args:
        gateway: Called with this object, it returns the gateway that tells it.

    Attributes:
        nodes: Their state.
    """

    def __init__(
        self,
        loop: EventLoop,
        engine: Engine,
        gateway: Callable[[NodeOwner], NodeGateway],
        limits: NodeLimits,
        listener: NodeListener,
    ) -> None:
        self.nodes = Nodes(0, limits)
        self._loop = loop
        self._engine = engine
        self._gateway = gateway(self)
        self._listener = listener
        self._greetings: dict[int, Greeting] = {}
        self._offers: list[int] = []  # of machines, while the gateway is being replaced
        # What has come of the end of the engine, until that is told: of all nodes, as one cause.
        self._held_back: dict[int, list[Callable[[], NodeDecision]]] = {}
        self._timer: Timer | None = None
        self._overdue: Timer | None = None  # of the gateway's answer
        self._asks = 0

    # --- requests; on any thread --------------------------------------------------------------

    def want(self, number: int, *, begins: bool = False) -> None:
        """Have that many nodes from now on; `leave` ends those that are too many.

        Where a wait for them *begins*, so does that for those asked for before.
        """
        self._post(lambda: decide.want(self.nodes, number, self._loop.time(), begins=begins))

    def leave(self, number: int) -> None:
        """End a node in good order."""
        self._post(lambda: decide.leave(self.nodes, number, self._loop.time()))

    def close(self) -> None:
        """End all nodes in good order, and ask for no others; `nodes` has none left at the end."""

        def leave_all() -> None:
            self._take(decide.want(self.nodes, 0, self._loop.time()))
            for node in self.nodes.nodes:
                self._take(decide.leave(self.nodes, node.number, self._loop.time()))

        self._loop.post(leave_all)

    def send(self, number: int, message: Message) -> None:
        """Send a message to a node that serves; one that is lost gets none."""

        def send() -> None:
            if not self.nodes.find(number, *HELD):
                return
            try:
                self._gateway.send(number, message)
            except OSError as error:
                if not isinstance(message, Launch):
                    raise
                why = f"its order was not sent: {error}"
                self._listener.received(number, NotStarted(number=message.number, error=why))

        self._loop.post(send)

    # --- what the engine tells; on any thread -------------------------------------------------

    def offered(self, number: int) -> None:
        """See `EngineEvents`."""

        def offer() -> None:
            self._take(decide.offered(self.nodes, number, self._loop.time()))
            self._offers.append(number)
            self._start_offered()

        self._loop.post(offer)

    def started(self, number: int, key: str) -> None:
        """See `EngineEvents`."""

        def admit() -> None:
            if self.nodes.find(number, NodeState.JOINING):
                self._gateway.admit(number, key)

        self._loop.post(admit)

    def unreached(self, number: int, why: str) -> None:
        """See `EngineEvents`."""

        def judge() -> None:
            address = self._gateway.endpoint
            remedy = "give cluster.bind an address of this machine that the others reach"
            message = f"{why}: {remedy}, and let its ports through"
            error = partial(AddressNotReached, address=address)
            self._take(decide.unreached(self.nodes, number, message, self._loop.time()), error)

        self._loop.post(judge)

    def suspect_reported(self, number: int, why: str) -> None:
        """See `EngineEvents`."""
        self._post(lambda: decide.suspect_reported(self.nodes, number, why, self._loop.time()))

    def gone(
        self, number: int, why: str, *, swept: bool, counts_against_machine: bool = True
    ) -> None:
        """See `EngineEvents`."""

        def judge() -> NodeDecision:
            node, at = (
                self.nodes.find(number, *HELD, NodeState.LOST, NodeState.LEAVING),
                self._loop.time(),
            )
            if node is not None and swept:
                return decide.ended(self.nodes, number, why, at)
            return decide.gone(
                self.nodes, number, why, at, counts_against_machine=counts_against_machine
            )

        def judge_all() -> None:
            self._take(judge())
            # Behind all nodes that go with this one: its ranks and theirs are one loss.
            for later in self._held_back.pop(number, ()):
                self._post(later)

        self._loop.post(judge_all)

    def engine_gone(self, why: str) -> None:
        """See `EngineEvents`."""
        self._loop.post(partial(self._listener.engine_gone, why))

    # --- what the gateway tells; on the event loop's thread -----------------------------------

    def ready(self) -> None:
        """See `GatewayEvents`."""
        self._loop.post(self._start_offered)

    def received(self, number: int, message: Message, at: float) -> None:
        """See `GatewayEvents`."""
        if isinstance(message, Greeting):
            self._greeted(number, message, at)
        elif isinstance(message, Swept):
            self._judge(number, lambda: decide.ended(self.nodes, number, "its last word", at))
        elif self.nodes.find(number, *HELD, NodeState.LEAVING):
            self._listener.received(number, message)

    def beat_received(self, number: int, at: float) -> None:
        """See `GatewayEvents`."""
        self._take(decide.beat_received(self.nodes, number, at))

    def closed(self, number: int, at: float) -> None:
        """See `GatewayEvents`."""
        self._judge(
            number, lambda: decide.gone(self.nodes, number, "its control link has ended", at)
        )

    def silenced(self, number: int, last: float) -> None:
        """See `GatewayEvents`."""
        self._take(decide.answers_ended(self.nodes, number, last))

    def asked(self, at: float) -> None:
        """See `GatewayEvents`."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        self._take(decide.time_passed(self.nodes, at))

    def misbehaved(self, number: int, why: str) -> None:
        """See `GatewayEvents`."""
        self._take(decide.gone(self.nodes, number, why, self._loop.time()))

    def refused(self, address: str, why: str) -> None:
        """See `GatewayEvents`."""
        self._listener.refused(address, why)

    def down(self, at: float) -> None:
        """See `GatewayEvents`."""
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        for node in self.nodes.nodes:
            if node.state is NodeState.LOST and node.answered_at is None:
                self._take(decide.answers_ended(self.nodes, node.number, at))
            elif node.state is not NodeState.ASKED:
                why = "the gateway of all nodes has ended"
                self._take(
                    decide.gone(self.nodes, node.number, why, at, counts_against_machine=False)
                )
        self._set_timer()

    # --- decisions ----------------------------------------------------------------------------

    def _post(self, judge: Callable[[], NodeDecision]) -> None:
        self._loop.post(lambda: self._take(judge()))

    def _judge(self, number: int, judge: Callable[[], NodeDecision]) -> None:
        """Take what has ended a node; not before the end of the engine that may be its cause."""
        if not self._engine.is_ending:
            self._take(judge())
        elif self.nodes.find(number, *HELD):
            self._held_back.setdefault(number, []).append(judge)
        else:
            self._post(judge)

    def _greeted(self, number: int, greeting: Greeting, at: float) -> None:
        why = why_unfit(greeting)
        if why:
            self._take(decide.unfit(self.nodes, number, why), NodeRefused)
            return
        self._greetings[number] = greeting
        machine = f"{greeting.boot}/{greeting.place[:MACHINE]}"
        slot = greeting.place[MACHINE:]
        self._take(decide.greeted(self.nodes, number, machine, at, slot))

    def _take(
        self, decision: NodeDecision, error: Callable[[str], RuntimeFault] | None = None
    ) -> None:
        """Go on from *decision*, and do what it says; *error* is that of `NoNode`."""
        self.nodes, actions = decision
        for action in actions:
            match action:
                case AskForNode(number=number):
                    self._engine.reserve(number, self)
                case Admit(number=number):
                    self._listener.admitted(number, self._greetings[number])
                case Suspect(number=number, why=why):
                    self._listener.suspected(number, why)
                case Recovered(number=number):
                    self._listener.recovered(number)
                case Lose(number=number, why=why):
                    self._lose(number, why)
                case Fenced(number=number, why=why):
                    self._listener.fenced(number, why)
                    self._let_go(number)
                case Dismiss(number=number, why=why):
                    self._dismiss(number, why)
                case PutAside(number=number, until=until):
                    self._listener.put_aside(number, self._greetings[number], until)
                case NoNode(why=why) if error is not None:
                    self._listener.failed(error(why))
                case NoNode(why=why):
                    message = ": ".join(filter(None, (why, self._engine.shortage())))
                    self._listener.failed(RuntimeFault(message))
        self._set_timer()
        if not self.nodes.nodes and not self.nodes.wanted:
            self._listener.emptied()

    def _lose(self, number: int, why: str) -> None:
        if not self._gateway.silence(number, why):
            # There is no gateway, so there are no answers.
            self.nodes, _ = decide.answers_ended(self.nodes, number, self._loop.time())
        self._listener.lost(number, why)

    def _dismiss(self, number: int, why: str) -> None:
        if self.nodes.find(number, NodeState.LEAVING):
            self._gateway.send(number, Leave())
        else:
            self._gateway.silence(number, why)
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        self._gateway.forget(number)
        self._greetings.pop(number, None)
        self._engine.release(number)

    def _start_offered(self) -> None:
        """Start nodes on the offered machines, once the gateway's address is known."""
        if not self._gateway.endpoint:
            return
        offers, self._offers = self._offers, []
        limits = self.nodes.limits
        for number in offers:
            if self.nodes.find(number, NodeState.JOINING):
                order = NodeOrder(
                    number=number,
                    endpoint=self._gateway.endpoint,
                    gateway_key=self._gateway.key,
                    lease=limits.lease,
                    join=limits.join,
                    place=uuid.uuid4().hex,
                )
                self._engine.start(number, order)

    # --- time ---------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.nodes.due()
        self._timer = None if due == math.inf else self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        if self._overdue is not None:
            return  # the gateway is about to answer
        self._asks += 1
        self._await_answer()
        if not self._gateway.ask(self._asks):
            self.asked(self._loop.time())

    def _await_answer(self) -> None:
        """Kill the gateway if it does not answer in time, unless this process was stopped."""
        until = self._loop.time() + self.nodes.limits.lease

        def judge() -> None:
            if self._loop.time() < until + _PAUSE:
                self._gateway.kill("it did not answer")
            else:  # its answer may wait behind what it had to tell meanwhile
                self._await_answer()

        self._overdue = self._loop.call_at(until, judge)
