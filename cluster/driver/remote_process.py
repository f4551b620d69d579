"""A rank's process on another machine, with the interface of a local one; acts by messages.

- Its node reports its exit when all its descendants have ended; so nothing is left to be killed.
- On a node that is lost its exit status is unknown, and signals are dropped.
"""

from __future__ import annotations

import threading
import time
from signal import SIGKILL
from typing import TYPE_CHECKING

from phalanx.cluster.link.messages import Kill, Signal, Stacks
from phalanx.runtime import ExitEvidence, Vitals

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.link.messages import Ended, Message, Output
    from phalanx.runtime import process_tree


class RemoteProcess:
    """One incarnation of one rank. Stands for a `Process`.

    Args:
        send: Sends a message to its node; on a lost one it goes nowhere.
        on_exit: Called once it has ended, on the event loop's thread.
        on_output: Called with what it has written, there too.

    Attributes:
        node: The number of its node.
        host: The name of the machine.
        pid: Its number there.
        device: The UUIDs of its GPUs, or ``cpu``.
        is_lost: Whether its node was lost, and it with that.
        broken: The fault of those for which its node has killed it; empty for none.
        status: How it ended; None while it lives, or if its node was lost.
        last_words: The traceback of its last exception, or the stacks of a fatal signal.
        stacks: The stacks that it wrote on request; empty without one.
        threads: The states of its threads, once `describe_threads` is answered.
    """

    def __init__(
        self,
        node: int,
        host: str,
        rank: int,
        incarnation: int,
        *,
        label: str,
        pid: int,
        device: str,
        send: Callable[[Message], None],
        on_exit: Callable[[RemoteProcess], None],
        on_output: Callable[[RemoteProcess, Output], None],
    ) -> None:
        self.node, self.host, self.pid, self.label = node, host, pid, label
        self.device = device
        self.is_lost = False
        self.broken = ""
        self.rank, self.incarnation = rank, incarnation
        self.status: ExitEvidence | None = None
        self.last_words = self.stacks = self.threads = ""
        self._is_stopped = False
        self._send = send
        self._on_exit = on_exit
        self._on_output = on_output
        self._ended = threading.Event()

    def __repr__(self) -> str:
        return f"<RemoteProcess {self.label!r} pid={self.pid} on {self.host}>"

    def send_signal(self, sig: int) -> bool:
        """Have *sig* sent; return False if it has ended, as far as is known."""
        if self._ended.is_set():
            return False
        names = {"rank": self.rank, "incarnation": self.incarnation}
        self._send(Kill(**names) if sig == SIGKILL else Signal(**names, signal=int(sig)))
        return True

    def wait(self, deadline: float) -> bool:
        """Return True once it has ended or its node is lost, False at *deadline* (monotonic)."""
        return self._ended.wait(max(0.0, deadline - time.monotonic()))

    def kill_tree(self, deadline: float) -> tuple[process_tree.Victim, ...]:
        """Have it and all that came from it killed; return once they are, or at *deadline*."""
        if self.send_signal(SIGKILL):
            self.wait(deadline)
        return ()

    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal, by the last report of its node."""
        return self._is_stopped

    def vitals(self) -> Vitals:
        """Return what is known of its state: whether it is there.

        It counts as ending until its node reports the end, or is lost: a SIGKILL may still be on
        its way to a node that is silent.
        """
        state = "T" if self._is_stopped else "S"
        return Vitals("" if self._ended.is_set() else state, is_ending=True)

    def describe_threads(self) -> str:
        """Ask for the states of its threads, which come later: see `threads`."""
        self._send(Stacks(rank=self.rank, incarnation=self.incarnation))
        return ""

    def close(self) -> None:
        """Release it."""

    # --- what its node tells, on the event loop's thread ----------------------------------

    def note_stopped(self, *, is_stopped: bool) -> None:
        """Note whether it is stopped."""
        self._is_stopped = is_stopped

    def wrote(self, message: Output) -> None:
        """Hand on what it has written."""
        self._on_output(self, message)

    def ended(self, message: Ended) -> None:
        """Note its end."""
        self.status = ExitEvidence(
            code=message.code,
            signal=message.signal,
            core_dumped=message.core_dumped,
            oom=message.oom,
            rusage=dict(message.rusage),
        )
        self.stacks, self.broken = message.stacks, message.broken
        self.last_words = message.last_words
        self._ended.set()
        self._on_exit(self)

    def lost(self) -> None:
        """Note that its node is lost, and sends no further reports."""
        self.is_lost = True
        self._ended.set()
