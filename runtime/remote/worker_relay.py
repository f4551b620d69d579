"""Starter of the relay: the process that carries all messages of a group's workers on a machine.

- Workers and relay share only anonymous memory and unnamed sockets of their
  machine. The process that starts them keeps no copy once they have them.
- A relay that has died, is stopped, or is not the one that the gateway knows is replaced when
  workers are started. With it all workers beside it end.
- The relay gets its configuration, its secret included, over inherited descriptors alone.
"""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.arena import Arena
from phalanx.runtime.process.child_main import LaunchSpec
from phalanx.runtime.process.helper import Helper
from phalanx.runtime.wire.channel import SocketChannel
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.runtime.process.child_process import Process
    from phalanx.runtime.process.launcher import Launcher
    from phalanx.supervision import ExitReason

RELAY_PRELOAD = ("zmq",)
"""The preload of the relay's zygote."""

UNREACHED = 64
"""Exit code of a process that never heard the driver's side."""

LINK_TIMED_OUT = 65
"""Exit code of one that heard it no more."""

_CLOSE = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The address and keys with which a relay connects to the gateway; pickled by name.

    Attributes:
        number: Of the relay that it is for.
        known: The number of the relay on the same machine that the gateway knows; 0 for none.
        endpoint: Where the driver's side listens.
        server_key: That side's public key, in ZeroMQ's own encoding.
        secret: The relay's secret key, 32 bytes, which opens once.
        route: The name of its link; as secret.
        heartbeat: As in `Zmq`.
        lost_after: As in `Zmq`.
    """

    number: int
    known: int
    endpoint: str
    server_key: str
    secret: bytes
    route: bytes
    heartbeat: float
    lost_after: float


class RelaySlot:
    """The ends of one incarnation beside a relay. Close it once its worker has them.

    Attributes:
        relay: Which process it is beside, counted from 1.
    """

    def __init__(self, relay: int, arena: Arena, epoch: int) -> None:
        self.relay = relay
        with ExitStack() as made:
            self._channel = SocketChannel.create(arena, epoch)
            made.callback(self._channel.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control, self._worker_end = descriptors.own(ours), descriptors.own(theirs)
            made.pop_all()

    def worker_fds(self) -> dict[str, int]:
        """Return what the worker inherits, by name."""
        return {"control": self._worker_end.fileno(), **self._channel.child_fds()}

    def relay_fds(self) -> dict[str, int]:
        """Return what the process beside it is given, by name; the arena it has."""
        fds = {"control": self._control.fileno(), **self._channel.driver_fds()}
        del fds["arena"]
        return fds

    def close(self) -> None:
        """Close them. Idempotent."""
        for end in (self._control, self._worker_end):
            if end.fileno() >= 0:
                descriptors.close(end)
        self._channel.close()


class WorkerRelay:
    """The process, through all its lives.

    Args:
        name: In titles, errors and events.
        on_exit: Called on the event loop's thread when a process has ended unasked, with its
            number (see `RelaySlot`), the reason, and whether it ended by itself because of its
            link.
    """

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        on_exit: Callable[[int, str, bool], None] = lambda _number, _why, _by_itself: None,
    ) -> None:
        self._launcher = launcher
        self._name = name
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._invitation: Invitation | None = None
        self._started = 0
        # By pid: number of the process, and its invitation. An exit may follow the next start.
        self._lives: dict[int, tuple[int, Invitation]] = {}
        self._deadline = 0.0
        self._is_wanted: Callable[[], bool] = lambda: True
        self._helper = Helper(launcher.loop, name, self._spawn, on_exit=self._exited)

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return self._helper.pid

    def open_slots(
        self,
        invitation: Invitation,
        workers: Sequence[tuple[int, int]],
        *,
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> list[RelaySlot]:
        """Return the ends of workers that are about to be started, one for each of *workers*.

        Args:
            invitation: For the process, if one has to be started.
            workers: The number of each, as the driver's side knows it, and its epoch.
            deadline: On the monotonic clock.
            is_wanted: Asked while it waits; the start is given up if it returns False.

        Raises:
            RuntimeFault, OSError: the process could not be started, or has just ended.
        """
        with self._lock:
            known = self._invitation
            is_known = known and known.number in (invitation.number, invitation.known)
            if not is_known or self._helper.is_stopped:
                self._lives.pop(self._helper.pid or 0, None)
                self._helper.end(time.monotonic() + _CLOSE)
            if self._helper.pid is None:
                self._start(invitation, deadline, is_wanted)
            assert self._arena is not None
            with ExitStack() as made:
                found: list[RelaySlot] = []
                for number, epoch in workers:
                    slot = RelaySlot(self._started, self._arena, epoch)
                    made.callback(slot.close)
                    fds = slot.relay_fds()
                    order = json.dumps({"seat": number, "fds": list(fds)}).encode()
                    if not self._helper.send(order, list(fds.values())):
                        raise RuntimeFault(f"the {self._name} has just ended; try again")
                    found.append(slot)
                made.pop_all()
                return found

    def close(self) -> None:
        """End the process; its workers have ended. Idempotent."""
        self._helper.close(time.monotonic() + _CLOSE, ask=not self._helper.is_stopped)
        with self._lock:
            self._release()

    def _start(
        self, invitation: Invitation, deadline: float, is_wanted: Callable[[], bool]
    ) -> None:
        self._release()
        self._arena = Arena.create()
        self._invitation = invitation
        self._started += 1
        self._deadline, self._is_wanted = deadline, is_wanted
        self._helper.start()

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        assert self._arena is not None
        assert self._invitation is not None
        spec = LaunchSpec(
            entry="phalanx.runtime.remote.worker_relay_main:main",
            payload=pickle.dumps(self._invitation),
            fds={"link": control.fileno(), "arena": self._arena.fd},
            label=self._name,
            title=f"phalanx: {self._name}",
            preload=RELAY_PRELOAD,
        )
        process = self._launcher.launch(
            spec, on_exit=on_exit, deadline=self._deadline, is_wanted=self._is_wanted
        )[0]
        self._lives[process.pid] = self._started, self._invitation
        return process

    def _exited(self, pid: int | None, reason: ExitReason) -> bool:
        life = None if pid is None else self._lives.pop(pid, None)
        if life is not None:
            number, known = life
            why = {
                UNREACHED: f"the ranks' side did not reach {known.endpoint}",
                LINK_TIMED_OUT: "the ranks' side heard nothing",
            }.get(reason.code or 0)
            if why is not None:
                within = f"{why} within lost_after={known.lost_after:g} s"
                self._on_exit(number, within, True)
            else:
                why = f"the process at the ranks' end died: {reason}"
                self._on_exit(number, why, False)
        return False

    def _release(self) -> None:
        arena, self._arena, self._invitation = self._arena, None, None
        if arena is not None:
            arena.close()
