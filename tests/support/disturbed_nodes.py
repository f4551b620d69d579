"""Clusters whose network can be disturbed: by a relay for each node, or by wires to namespaces.

Both are a `phalanx.chaos.NodeNetwork`.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_engine import LocalEngine, LocalNodes
from tests.support.relayed_links import Relay, bare_namespace, free_port, ip

from phalanx.cluster.link.messages import NodeOrder
from phalanx.runtime import EventLoop

# The node is not the init of its pid namespace, which SIGKILL from inside does not reach.
INIT = ("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", '"$@"; exit $?', "init")


class Disturbances:
    """What disturbs one way to a node and back, at present.

    Args:
        apply: Called with the seconds by which what goes there is delayed, and what comes back.
    """

    def __init__(self, apply: Callable[[float, float], None]) -> None:
        self._apply = apply
        self._lock = threading.Lock()
        self._all: list[tuple[float, float]] = [(0.0, 0.0)]

    def add(self, inward: float, outward: float) -> Callable[[], None]:
        """Disturb it by this too; return what ends that."""
        with self._lock:
            self._all.append((inward, outward))
            self._renew()

        def end() -> None:
            with self._lock:
                self._all.remove((inward, outward))
                self._renew()

        return end

    def _renew(self) -> None:
        self._apply(max(each[0] for each in self._all), max(each[1] for each in self._all))


class RelayedEngine(LocalEngine):
    """An engine whose nodes reach the driver through a relay each."""

    def __init__(self, loop: EventLoop, **options: Any) -> None:
        super().__init__(loop, edit=self._behind, **options)
        self._relays: dict[int, Relay] = {}
        self.disturbances: dict[int, Disturbances] = {}

    def _behind(self, order: NodeOrder) -> NodeOrder:
        host, _, port = order.endpoint.removeprefix("tcp://").rpartition(":")
        between = free_port(host)
        relay = self._relays[order.number] = Relay(host, between, host, port)
        self.disturbances[order.number] = Disturbances(partial(_disturb, relay))
        return replace(order, endpoint=f"tcp://{host}:{between}")

    def close(self) -> None:
        super().close()
        for relay in self._relays.values():
            relay.close()


@dataclass(frozen=True, kw_only=True)
class RelayedNodes(LocalNodes):
    """Nodes whose links go through a relay each: that takes no privileges."""

    engine_type: type[LocalEngine] = RelayedEngine

    def disturb(self, node: int, inward: float, outward: float) -> Callable[[], None]:
        engine = self.engines[-1]
        assert isinstance(engine, RelayedEngine)
        if math.inf in (inward, outward):
            engine.cut_off(node)  # what started it would be cut off too
        return engine.disturbances[node].add(inward, outward)


def _disturb(relay: Relay, inward: float, outward: float) -> None:
    relay.heal()
    relay.delay(max((each for each in (inward, outward) if each < math.inf), default=0.0))
    for way, delay in (("down", inward), ("up", outward)):
        if delay == math.inf:
            relay.cut(way)


@dataclass(frozen=True)
class Machine:
    """A network namespace at the end of a wire.

    Attributes:
        here: Our address on the wire.
        prefix: What a command line begins with that is to run there.
    """

    here: str
    prefix: tuple[str, ...]
    disturbances: Disturbances


@contextlib.contextmanager
def wired_machine() -> Generator[Machine]:
    if not Path("/dev/net/tun").exists():
        pytest.skip("a wire to a network namespace needs /dev/net/tun")
    with contextlib.ExitStack() as left:
        name, net = left.enter_context(bare_namespace())
        program = [sys.executable, str(Path(__file__).with_name("wire.py")), f"{name}a", f"{name}b"]
        wire = left.enter_context(
            subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        left.callback(wire.kill)

        def order(*words: object) -> None:
            assert wire.stdin is not None
            assert wire.stdout is not None
            if words:
                wire.stdin.write(" ".join(map(str, words)) + "\n")
                wire.stdin.flush()
            assert wire.stdout.readline().strip() in ("ready", "done")

        order()
        within = ("ip", "netns", "exec", name)
        ip("link", "set", f"{name}b", "netns", name)
        ip("addr", "add", f"{net}.1/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        for words in (
            ("addr", "add", f"{net}.2/30", "dev", f"{name}b"),
            ("link", "set", f"{name}b", "up"),
            ("link", "set", "lo", "up"),  # ranks of one machine meet there
            ("route", "add", "default", "via", f"{net}.1"),
        ):
            ip(*within[1:], "ip", *words)
        yield Machine(f"{net}.1", (*within, *INIT), Disturbances(order))


@dataclass(frozen=True, kw_only=True)
class WiredNodes(LocalNodes):
    """Nodes on machines that are namespaces at the ends of wires."""

    machines: tuple[Machine, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine_options["slots"] = len(self.machines)
        self.engine_options["prefix"] = lambda slot: self.machines[slot].prefix

    def disturb(self, node: int, inward: float, outward: float) -> Callable[[], None]:
        engine = self.engines[-1]
        if math.inf in (inward, outward):
            engine.cut_off(node)  # what started it would be cut off too
        return self.machines[engine.slot_of[node]].disturbances.add(inward, outward)
