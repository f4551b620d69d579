"""Starter of a node process: by exec; a sweep of leftover processes before and after it.

- One exec lies between the starter and the node's guardian, so nothing that ends the starter's own
  children ends the guardian.
- Before the start, and after the end, all processes of earlier nodes at the same place are killed.
- The node process ends with its starter.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from phalanx.cluster.link.messages import NodeKey, NodeUnreached, decode, encode
from phalanx.runtime import Helper, process_tree, start_helper

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from phalanx.cluster.link.messages import NodeOrder
    from phalanx.runtime import EventLoop, Process
    from phalanx.supervision import ExitReason

_SWEEP = 10.0


class NodeStarter:
    """Starts one node process.

    Args:
        on_key: Called with the node's public key, on the event loop's thread.
        on_gone: Called once, with the reason, and whether all that came from the node has ended.
        on_unreached: Called if it gets no connection to the driver's side, with the reason.
        prefix: The beginning of its command line, such as a program that enters a namespace.
    """

    def __init__(
        self,
        loop: EventLoop,
        order: NodeOrder,
        *,
        on_key: Callable[[str], None],
        on_gone: Callable[[str, bool], None],
        on_unreached: Callable[[str], None] = lambda _why: None,
        prefix: Sequence[str] = (),
    ) -> None:
        self._loop = loop
        self._order = order
        self._on_key = on_key
        self._on_gone = on_gone
        self._on_unreached = on_unreached
        self._prefix = prefix
        self._sweeper: threading.Thread | None = None
        outer = process_tree.TreeTag.new(dict(os.environ)).outer
        self._tag = process_tree.TreeTag(outer, order.place)
        self._helper = Helper(
            loop,
            f"node {order.number}",
            self._spawn,
            on_message=self._on_message,
            on_exit=self._exited,
            replay=lambda: [(encode(order)[0], ())],
        )

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return self._helper.pid

    def start(self) -> None:
        """End what an earlier node has left, and start the process. Not on the loop's thread.

        Raises:
            RuntimeFault: it could not be started.
        """
        self._sweep()
        self._helper.start()

    def close(self, deadline: float) -> None:
        """End the process, at *deadline* (monotonic) by force, and what it has left.

        Raises:
            RuntimeFault: it withstood that.
        """
        self._helper.close(deadline, ask=True)
        self._sweep()
        if self._sweeper is not None and self._sweeper.is_alive():
            self._sweeper.join(_SWEEP)  # it would end the next node at this place, too

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        tag = self._tag.of(self._order.number, f"node {self._order.number}")
        return start_helper(
            self._loop,
            f"node {self._order.number}",
            [*self._prefix, sys.executable, "-P", "-m", "phalanx.cluster.node_process.main"],
            [],
            control=control,
            on_exit=on_exit,
            env={**os.environ, process_tree.VARIABLE: tag.value},
        )

    def _on_message(self, data: bytes, _fds: list[int]) -> None:
        match decode([data]):
            case NodeKey(key=key):
                self._on_key(key)
            case NodeUnreached(why=why):
                self._on_unreached(why)
            case _:
                pass

    def _exited(self, _pid: int | None, reason: ExitReason) -> bool:
        # Not on the loop's thread: a sweep takes its time.
        end = partial(self._end, str(reason))
        self._sweeper = threading.Thread(target=end, name="phalanx-node-sweep", daemon=True)
        try:
            self._sweeper.start()
        except RuntimeError:  # the limit of threads is reached, maybe by what is to be swept
            end()
        return False

    def _end(self, why: str) -> None:
        if self._helper.closed:  # `close` sweeps, and may have looked before this thread was there
            return
        is_swept = not self._sweep()
        self._on_gone(f"its process has ended: {why}", is_swept)

    def _sweep(self) -> Sequence[process_tree.Victim]:
        target = process_tree.TreeTarget(self._tag.pattern)
        return process_tree.kill(target, time.monotonic() + _SWEEP)
