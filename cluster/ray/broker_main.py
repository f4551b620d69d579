"""The broker: the process beside the driver that requests machines, and agents on them, from Ray.

- The nodes that the ranks need first are one placement group: all of them or none. The spares, and
  any later one, are separate groups, on other machines if any have room. A bundle of the first
  group that was left, or that Ray has placed again, is taken if its agent is there earlier.
- Ray's state of an agent is reported unchanged: one that Ray cannot reach is in doubt, one that Ray
  has declared dead is lost. An agent's report that its node process has ended is passed on too.
- A node is reported as offered when its agent runs: Ray's queue is not part of the time to join.
- It ends with the driver, and Ray then ends the agents, whose owner it is. The loss of Ray's head
  is reported at once.

Why a process: Ray ends the process that has called ``ray.init`` a minute after Ray's head is gone.
"""

from __future__ import annotations

import json
import os
import queue
import select
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util import (
    get_node_ip_address,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx.cluster.link.messages import MACHINE, NodeOrder, decode, encode

from .agent import Agent

if TYPE_CHECKING:
    from collections.abc import Callable

_ORDER = 128 * 1024  # bytes
_REACH = 5.0  # seconds for a connection to Ray's head; by itself Ray tries for three minutes
_AGAIN = 2.0  # seconds until the next attempt, where an earlier broker had reached the cluster
_LOOK = 2.0  # seconds between looks at what there is, while a node waits
_HEAD = 1.0  # seconds between looks whether Ray's head is there
_NODE_ID = "ray.io/node-id"  # the label that Ray gives each of its nodes
_THREADS = 4  # of an agent: it starts, waits, and is stopped


def main() -> None:
    """Serve; the arguments are the control socket and the driver's pidfd."""
    control, driver = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    opening = json.loads(control.recv(_ORDER))
    try:
        broker = Broker(control, opening)
    except Exception as error:  # noqa: BLE001  # of whatever kind Ray's are
        _tell(control, failed=f"Ray at address={opening['address']!r}: {text_of(error)}")
        select.select([control], [], [], _AGAIN)
        sys.exit(1)
    broker.run()
    ray.shutdown()


def _end_with(driver: int) -> None:
    select.select([driver], [], [])
    os._exit(1)


def _watch_head(control: socket.socket, address: str) -> None:
    was_there = True
    while True:
        time.sleep(_HEAD)
        try:
            check_reachable(address)
            was_there = True
        except OSError as error:
            if was_there:
                _tell(control, engine_gone=f"Ray's head at {address} is not reached: {error}")
            was_there = False


def _tell(control: socket.socket, **what: Any) -> None:
    try:
        control.send(json.dumps(what).encode(), socket.MSG_NOSIGNAL)
    except OSError:
        os._exit(1)  # the driver has closed the socket


def text_of(error: BaseException) -> str:
    """Return *error* as one line."""
    cause = getattr(error, "cause", None) or error  # of what an agent raised
    return " ".join(f"{type(cause).__name__}: {cause}".split())[-1000:]


@dataclass(eq=False)
class _Bundle:
    group: Any
    index: int
    is_shared: bool  # the group is not to be removed with it


@dataclass(eq=False)
class _Agent:
    bundle: _Bundle
    actor: Any
    node: str = ""  # Ray's name of it, once it runs


@dataclass(eq=False)
class _Node:
    number: int
    tries: list[_Agent] = field(default_factory=list[_Agent])  # until one of them runs
    agent: _Agent | None = None
    is_apart: bool = False  # it asks for a machine without another node
    is_gone: bool = False


class Broker:
    """The broker. Used by one thread; what Ray answers comes through a queue."""

    def __init__(self, control: socket.socket, opening: dict[str, Any]) -> None:
        self._control = control
        check_reachable(opening["address"])
        ray.init(
            address=opening["address"],
            runtime_env=opening["runtime_env"] or None,
            logging_level="warning",
        )
        self._name = uuid.UUID(opening["name"])
        ranks = opening["ranks_per_node"] or _ranks_per_node(opening["gpus_per_rank"])
        gpus = ranks * opening["gpus_per_rank"]
        asked: dict[str, float] = {"CPU": 1, "GPU": gpus, **opening["resources"]}
        self._bundle = {name: amount for name, amount in asked.items() if amount}
        if not self._bundle:
            raise ValueError("by cluster.resources a node reserves nothing: give one of them")
        self._spares: int = opening["spare_nodes"]
        self._nodes: dict[int, _Node] = {}
        self._first: list[_Node] = []  # those of the first group
        self._left: list[_Bundle] = []  # of the first group, without a node
        self._places: dict[str, _Node] = {}
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._tell(address=get_node_ip_address(), ranks_per_node=ranks)
        head = (control, ray.get_runtime_context().gcs_address)
        threading.Thread(target=_watch_head, args=head, daemon=True).start()

    def run(self) -> None:
        """Take orders until the driver closes the socket."""
        poller = select.poll()
        for fd in (self._control.fileno(), self._wakeup):
            poller.register(fd, select.POLLIN)
        while True:
            is_waiting = any(node.agent is None for node in self._nodes.values())
            ready = dict(poller.poll(_LOOK * 1000 if is_waiting else None))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
            while not self._answers.empty():
                self._answers.get()()
            if self._control.fileno() in ready:
                data = self._control.recv(_ORDER)
                if not data:
                    return
                self._obey(json.loads(data))
            if is_waiting and not ready:
                with suppress(Exception):  # the head is gone
                    self._tell(shortage=self._shortage())
                    self._try_others()
                    self._try_beside_others()

    def _tell(self, **what: Any) -> None:
        _tell(self._control, **what)

    def _obey(self, order: dict[str, Any]) -> None:
        match order:
            case {"reserve": numbers}:
                self._reserve([number for number in numbers if number not in self._nodes])
            case {"start": number, "order": text} if number in self._nodes:
                self._start(self._nodes[number], text)
            case {"release": number}:
                self._release(number)
            case _:
                pass

    def _post(self, act: Callable[[], None]) -> None:
        self._answers.put(act)
        os.eventfd_write(self._wakeup, 1)

    def _then(self, ref: Any, act: Callable[[Any, BaseException | None], None]) -> None:
        """Have *act* called with the value of *ref*, or its error, on this thread."""

        def answered(future: Any) -> None:
            error = future.exception()
            value = None if error else future.result()
            self._post(partial(act, value, error))

        ref.future().add_done_callback(answered)

    # --- reservations -------------------------------------------------------------------------

    def _reserve(self, numbers: list[int]) -> None:
        nodes = [_Node(number) for number in numbers]
        if not self._nodes and (first := nodes[: len(nodes) - self._spares]):
            group = placement_group([self._bundle] * len(first), strategy="STRICT_SPREAD")
            for index, node in enumerate(first):
                self._try(node, _Bundle(group, index, is_shared=len(first) > 1))
            self._first = first
        self._nodes |= {node.number: node for node in nodes}
        self._try_others()
        self._offer_left()

    def _try_others(self) -> None:
        """Try a separate group for each node without one, once the first group is there."""
        if any(node.agent is None and node.number in self._nodes for node in self._first):
            return
        for node in self._nodes.values():
            if node.agent is None and not node.tries:
                taken = {each.agent.node for each in self._nodes.values() if each.agent} - {""}
                apart = [{_NODE_ID: f"!in({', '.join(sorted(taken))})"}] if taken else None
                group = placement_group([self._bundle], bundle_label_selector=apart)
                node.is_apart = apart is not None
                self._try(node, _Bundle(group, 0, is_shared=False))

    def _try_beside_others(self) -> None:
        """Try any machine for the nodes for which there is none without another node."""
        for node in self._nodes.values():
            own = [each.bundle.group for each in node.tries if not each.bundle.is_shared]
            if node.is_apart and all(_state_of(group) != "CREATED" for group in own):
                node.is_apart = False
                self._try(node, _Bundle(placement_group([self._bundle]), 0, is_shared=False))

    def _offer_left(self) -> None:
        """Try what is left of the first group for the nodes that wait."""
        for node in self._nodes.values():
            is_trying = any(each.bundle.is_shared for each in node.tries)
            if self._left and node.agent is None and not is_trying:
                self._try(node, self._left.pop(0))

    def _try(self, node: _Node, bundle: _Bundle) -> None:
        needs = dict(self._bundle)
        actor = (
            ray.remote(Agent)
            .options(
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                memory=needs.pop("memory", None),
                resources=needs,
                max_restarts=0,
                max_concurrency=_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
            )
            .remote()
        )
        agent = _Agent(bundle, actor)
        node.tries.append(agent)
        self._then(actor.where.remote(), partial(self._runs, node, agent))

    def _runs(self, node: _Node, agent: _Agent, where: Any, error: BaseException | None) -> None:
        if agent not in node.tries:
            return  # another was earlier, or the node is not wanted
        node.tries.remove(agent)
        if error is None:
            node.agent, (agent.node, _) = agent, where
            for other in node.tries:
                self._drop(other)
            node.tries.clear()
            node.is_apart = False
            self._tell(node=node.number, offered=True)
            self._watch(node, agent)
            self._try_others()
        elif not node.tries:
            # It has had a machine, and would fail there again: that is to be counted.
            node.agent = agent
            self._tell(node=node.number, offered=True)
            self._gone(node, text_of(error), is_swept=True)
        elif not agent.bundle.is_shared:
            self._drop(agent)

    def _drop(self, agent: _Agent) -> None:
        with suppress(Exception):  # the head is gone
            ray.kill(agent.actor)
        if agent.bundle.is_shared:
            self._left.append(agent.bundle)
            return
        with suppress(Exception):
            remove_placement_group(agent.bundle.group)

    def _release(self, number: int) -> None:
        node = self._nodes.pop(number, None)

        def let_go(_: Any = None, _error: BaseException | None = None) -> None:
            if node is not None:
                for agent in (*node.tries, *([node.agent] if node.agent else [])):
                    self._drop(agent)
                node.tries.clear()
            self._tell(node=number, released=True)
            self._try_others()
            self._offer_left()

        if node is None or node.agent is None:
            let_go()
        else:
            self._then(node.agent.actor.stop.remote(), let_go)

    # --- node processes -----------------------------------------------------------------------

    def _start(self, node: _Node, text: str) -> None:
        order = decode([text.encode()])
        assert isinstance(order, NodeOrder)
        assert node.agent is not None
        order = replace(order, place=self._place(node, node.agent))
        ref = node.agent.actor.start.remote(encode(order)[0].decode())
        self._then(ref, partial(self._started, node, node.agent))

    def _place(self, node: _Node, agent: _Agent) -> str:
        """Return a place on the agent's machine: one that was a lost node's, if there is one."""
        count, machine = 0, uuid.uuid5(self._name, agent.node).hex[:MACHINE]
        while True:
            place = f"{machine}{count:08x}"
            holder = self._places.get(place)
            if holder is None or holder.is_gone or holder.number not in self._nodes:
                self._places[place] = node
                return place
            count += 1

    def _started(self, node: _Node, agent: _Agent, key: Any, error: BaseException | None) -> None:
        if key:
            self._tell(node=node.number, key=key)
            self._then(agent.actor.unreached.remote(), partial(self._unreached, node))
        elif error is not None and not isinstance(error, RayActorError):
            self._gone(node, text_of(error), is_swept=True)

    def _unreached(self, node: _Node, why: Any, _error: BaseException | None) -> None:
        if why and node.number in self._nodes:
            self._tell(node=node.number, unreached=why)

    def _watch(self, node: _Node, agent: _Agent) -> None:
        self._then(agent.actor.ended.remote(), partial(self._ended, node, agent))

    def _ended(self, node: _Node, agent: _Agent, how: Any, error: BaseException | None) -> None:
        if error is None:
            self._gone(node, *how)
        elif isinstance(error, ActorUnavailableError):
            self._tell(node=node.number, doubt=f"Ray does not reach its agent: {text_of(error)}")
            again = threading.Timer(_AGAIN, self._post, (partial(self._watch, node, agent),))
            again.daemon = True
            again.start()
        else:
            self._gone(node, f"Ray says that its agent is dead: {text_of(error)}", is_swept=False)

    def _gone(self, node: _Node, why: str, is_swept: bool) -> None:
        if not node.is_gone and node.number in self._nodes:
            node.is_gone = True
            self._tell(node=node.number, gone=why, swept=is_swept)

    # --- what there is ------------------------------------------------------------------------

    def _shortage(self) -> str:
        there = [
            f"{node['NodeManagerHostname']} {_amounts(node['Resources'])}"
            for node in ray.nodes()
            if node["Alive"]
        ]
        return f"a node needs {_amounts(self._bundle)}, and Ray has: {'; '.join(there)}"


def check_reachable(address: str) -> None:
    """Raise ConnectionError if nothing listens where Ray's head should."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


def _ranks_per_node(gpus_per_rank: float) -> int:
    """Return for how many ranks the largest machine has GPUs.

    Raises:
        ValueError: for none.
    """
    most = max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
    if not gpus_per_rank or most < gpus_per_rank:
        raise ValueError(
            f"no machine has {gpus_per_rank:g} GPUs for a rank: give cluster.ranks_per_node"
            if gpus_per_rank
            else "without GPUs, cluster.ranks_per_node has to be given"
        )
    return int(most // gpus_per_rank)


def _state_of(group: Any) -> Any:
    return placement_group_table(group)["state"]


def _amounts(resources: dict[str, float]) -> str:
    shown = {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(("node:", "memory", "object_store_memory", "accelerator_type:"))
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"
