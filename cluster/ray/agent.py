"""The agent: the actor that runs the node process of one bundle.

- One exec lies between it and the node process, because Ray ends an actor's own children with it.
- It ends with its raylet, and the node process with it.
- It returns the outcome of the node process when all descendants of that have ended.
- It releases its bundle when the memory of its GPUs is free, which the next user of them needs, or
  a minute later: another process may hold it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

import ray

from phalanx.cluster.link.messages import NodeOrder, decode
from phalanx.cluster.node_process.starter import NodeStarter
from phalanx.runtime import EventLoop, find_gpus, visible

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLOSE = 10.0
_FREE = 60.0
_POLL = 0.1  # seconds; NVML has no event for memory that is released
_SLACK = 256 << 20  # bytes that the memory in use of a GPU may differ by


class Agent:
    """One node's. Its methods run at the same time, each on a thread."""

    def __init__(self) -> None:
        self._loop = EventLoop()
        self._changed = threading.Condition()
        self._starter: NodeStarter | None = None
        self._key = self._unreached = self._why = ""
        self._is_swept = False
        self._join = 0.0  # seconds in which the node greets, or never
        self._used = _used_bytes()
        # Ray looks for this by the number of the parent, which need not be 1 for an orphan.
        raylet = os.pidfd_open(os.getppid())
        self._loop.watch(raylet, select.EPOLLIN, lambda _: os._exit(1))

    def where(self) -> tuple[str, str]:
        """Return the name of Ray's node, and of its machine."""
        return ray.get_runtime_context().get_node_id(), socket.gethostname()

    def start(self, order: str) -> str:
        """Start the node process; return its public key, empty if it has ended before.

        Raises:
            RuntimeFault: it could not be started.
        """
        node_order = decode([order.encode()])
        assert isinstance(node_order, NodeOrder)
        self._join = node_order.join
        self._starter = NodeStarter(
            self._loop,
            node_order,
            on_key=self._has_key,
            on_gone=self._has_ended,
            on_unreached=self._is_unreached,
        )
        self._starter.start()
        with self._changed:
            self._changed.wait_for(lambda: self._key or self._why, self._join)
            return self._key

    def unreached(self) -> str:
        """Return why the node process does not reach the driver's side; empty if it may have."""
        with self._changed:
            self._changed.wait_for(lambda: self._unreached or self._why, self._join)
            return self._unreached

    def ended(self) -> tuple[str, bool]:
        """Return how the node process has ended, and whether all that came from it has."""
        with self._changed:
            self._changed.wait_for(lambda: self._why)
            return self._why, self._is_swept

    def stop(self) -> None:
        """End the node process and what it has left; return when the GPUs are free."""
        if self._starter is not None:
            self._starter.close(time.monotonic() + _CLOSE)
        self._has_ended("it was let go", is_swept=True)
        until = time.monotonic() + _FREE
        while time.monotonic() < until and any(
            used > self._used.get(gpu, 0) + _SLACK for gpu, used in _used_bytes().items()
        ):
            time.sleep(_POLL)

    def _has_key(self, key: str) -> None:
        with self._changed:
            self._key = key
            self._changed.notify_all()

    def _is_unreached(self, why: str) -> None:
        with self._changed:
            self._unreached = why
            self._changed.notify_all()

    def _has_ended(self, why: str, is_swept: bool) -> None:
        with self._changed:
            if not self._why:
                self._why, self._is_swept = why, is_swept
            self._changed.notify_all()


def _used_bytes() -> Mapping[str, int]:
    """Return the bytes in use on each GPU that Ray has given, where that can be measured."""
    inventory = find_gpus()
    try:
        gpus = visible(inventory.gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        return {gpu.uuid: inventory.used_bytes(gpu.uuid) or 0 for gpu in gpus}
    finally:
        inventory.close()
