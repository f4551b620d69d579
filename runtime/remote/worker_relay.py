"""A rank's side of its link, as the driver starts it: a process beside the worker.

Guarantees: everything that worker and process share is anonymous memory and unnamed sockets of the
machine they run on, made before both; the driver keeps none of it once they have started. What the
process must know, its secret included, reaches it over an inherited descriptor alone.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.arena import Arena
from phalanx.runtime.process.launch_spec import LaunchSpec
from phalanx.runtime.wire.channel import SocketChannel

if TYPE_CHECKING:
    from phalanx.runtime.process.child_process import Process

RELAY_PRELOAD = ("zmq",)
"""What the zygote of both relays has imported."""

_BURIAL = 5.0  # seconds for a process that has been killed to be gone

UNREACHED = 64
"""Exit code of a process that never heard the driver's side, while its worker lived."""

UNHEARD = 65
"""Exit code of one that heard it no more, while its worker lived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """What a rank's side is told at its birth; pickled by name.

    Attributes:
        endpoint: Where the driver's side listens.
        server_key: That side's public key, in ZeroMQ's own encoding.
        secret: This incarnation's secret key, 32 bytes.
        route: The name of this link; as secret.
        heartbeat: As in `Zmq`.
        lost_after: As in `Zmq`.
    """

    endpoint: str
    server_key: str
    secret: bytes
    route: bytes
    heartbeat: float
    lost_after: float


class Outpost:
    """One incarnation's.

    Attributes:
        label: Its name in marks and events.
        posting: What its process is told.
        process: None until it has been started.
    """

    def __init__(self, posting: Posting, label: str, title: str, epoch: int) -> None:
        self.label = label
        self.posting = posting
        self.process: Process | None = None
        self._title = title
        with contextlib.ExitStack() as made:
            self._arena = Arena.create()
            made.callback(self._arena.close)
            self._channel = SocketChannel.create(self._arena, epoch)
            made.callback(self._channel.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control, self._control_end = descriptors.own(ours), descriptors.own(theirs)
            made.pop_all()

    def worker_fds(self) -> dict[str, int]:
        """Return what the worker inherits, by name."""
        return {"control": self._control_end.fileno(), **self._channel.child_fds()}

    def launch_spec(self) -> LaunchSpec:
        """Return how its process is started."""
        return LaunchSpec(
            entry="phalanx.runtime.remote.worker_relay_main:main",
            payload=pickle.dumps(self.posting),
            fds={"control": self._control.fileno(), **self._channel.driver_fds()},
            label=self.label,
            title=self._title,
            preload=RELAY_PRELOAD,
        )

    def close_ends(self) -> None:
        """Let go of what only the two processes use; they have been started or never will be."""
        for end in (self._control, self._control_end):
            if end.fileno() >= 0:
                descriptors.close(end)
        self._channel.close()
        self._arena.close()

    def why_it_left(self, process: Process) -> str:
        """Return why *process* gave its worker up of itself; empty where it did not."""
        status = process.status
        within = f"lost_after={self.posting.lost_after:g} s"
        code = None if status is None else status.code
        if code == UNREACHED:
            return f"the rank's side did not reach {self.posting.endpoint} within {within}"
        return f"the rank's side heard nothing for {within}" if code == UNHEARD else ""

    def bury(self) -> None:
        """End the process, whose worker is gone."""
        self.close_ends()
        process, self.process = self.process, None
        if process is not None:
            deadline = time.monotonic() + _BURIAL
            process.send_signal(signal.SIGKILL)  # nothing came from it that could be left
            process.wait(deadline)
            process.close()
