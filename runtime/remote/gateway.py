"""`Gateway`: the driver's handle of the gateway process, through which it reaches remote ranks.

Guarantees: there is one per group, started when it is first needed; one that has died, or no
longer answers, is replaced at the next start of ranks, and its death is an event; secrets reach it
and the relays over inherited descriptors alone.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.runtime.event import Event, LoggedEvent
from phalanx.runtime.process.child_main import LaunchSpec
from phalanx.runtime.process.helper import Helper
from phalanx.runtime.process.zygote_client import SLICE, LaunchWait
from phalanx.supervision import ExitReason, RuntimeFault

from .worker_relay import RELAY_PRELOAD, Invitation

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.runtime.process.child_process import Process
    from phalanx.runtime.process.launcher import Launcher
    from phalanx.runtime.threads.event_loop import EventLoop

    from .options import Zmq

_START = 60.0  # seconds; a zygote that is still importing comes first
_ANSWER = 5.0  # seconds to answer at all
_CLOSE = 5.0


class GatewayExited(Event, event="gateway_exited", level="error"):
    """The process between a driver and its ranks elsewhere died while it was in use.

    With it all links are lost, and their ranks are restarted.
    """

    group: str
    pid: int
    reason: ExitReason


class PeerRejected(Event, event="peer_rejected", level="warning"):
    """A connection without a valid key of this group was refused; published once for each kind.

    Attributes:
        address: Its source; empty if that is not known.
    """

    group: str
    address: str
    why: str


class MessageMalformed(Event, event="message_malformed", level="warning"):
    """A malformed message arrived on a link and was dropped. Published once."""

    group: str


class Gateway:
    """The gateway process of one group, restarts included.

    `open`, `invite` and `add_rank`: one thread at a time.

    Args:
        launcher: Starts the process when ranks are started.
        on_event: Gets its events. Runs on the event loop's thread.

    Attributes:
        endpoint: The address for relays, as ``tcp://HOST:PORT``; empty while there is no process.
        key: Its public key, in ZeroMQ's encoding.
    """

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        options: Zmq,
        *,
        group: str,
        on_event: Callable[[LoggedEvent], None],
    ) -> None:
        self._launcher = launcher
        self._options = options
        self._group = group
        self._on_event = on_event
        self._changed = threading.Condition()
        self._loop = loop
        self._failed = ""
        self.endpoint = self.key = ""
        self._pings = self._pong = 0
        self._entry = "phalanx.runtime.remote.gateway_main:main"
        self._numbers = 0
        self._connected_relays: dict[int, int] = {}  # the connected one, by machine
        self._invited: dict[int, Invitation] = {}  # relays that have not connected yet
        self._is_wanted: Callable[[], bool] = lambda: True
        self._helper = Helper(
            loop,
            f"gateway of {group}",
            self._spawn,
            on_message=self._on_message,
            on_exit=self._exited,
        )

    @property
    def pid(self) -> int | None:
        """The process; None where there is none just now."""
        return self._helper.pid

    def open(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Have the process there, and answering; given up where *is_wanted* returns False.

        Raises:
            RuntimeFault: it cannot be started, or not listen where it should.
        """
        if self._helper.pid is not None and not self._answers():
            self._helper.end(time.monotonic() + _CLOSE)
        if self._helper.pid is not None:
            return
        self._is_wanted = is_wanted
        self._failed = ""
        self._forget_process()
        try:
            self._helper.start()
            self._await_ready()
        except BaseException:
            self._helper.end(time.monotonic() + _CLOSE)
            raise

    def invite(self, where: int) -> Invitation:
        """Return how the process beside the ranks on the machine *where* gets in, if it is new.

        Raises:
            RuntimeFault: the process has just died.
        """
        with self._changed:
            connected = self._connected_relays.get(where, 0)
            if where in self._invited:
                return replace(self._invited[where], known=connected)
            self._numbers += 1
            invitation = Invitation(
                number=self._numbers,
                known=connected,
                endpoint=self.endpoint,
                server_key=self.key,
                secret=os.urandom(32),
                # ZeroMQ keeps names that begin with 0 for itself.
                route=b"\1" + secrets.token_bytes(15),
                heartbeat=self._options.heartbeat,
                lost_after=self._options.lost_after,
            )
            self._invited[where] = invitation
        key, route = invitation.secret.hex(), invitation.route.hex()
        order = {"invite": invitation.number, "where": where, "secret": key, "route": route}
        if not self._send(order):
            raise self._has_ended()
        return invitation

    def add_rank(self, where: int, fds: Mapping[str, int], launch: float = 0.0) -> int:
        """Make room for one rank on the machine *where*, behind *fds*; return its number.

        Its side has a minute to connect once its *launch*, which may take so many seconds, is over:
        see `launched`.

        Raises:
            RuntimeFault: the process has just died.
        """
        self._numbers += 1
        order = {"rank": self._numbers, "where": where, "launch": launch, "fds": list(fds)}
        if not self._send(order, *fds.values()):
            raise self._has_ended()
        return self._numbers

    def launched(self, numbers: Sequence[int]) -> None:
        """Note that the ranks of those *numbers* run."""
        self._send({"launched": list(numbers)})

    def close(self) -> None:
        """End the process. Idempotent."""
        stopped = self._helper.is_stopped
        self._helper.close(time.monotonic() + (0.0 if stopped else _CLOSE), ask=True)

    def _send(self, order: Mapping[str, object], *fds: int) -> bool:
        """Send the process an order; False if there is no process."""
        return self._helper.send(json.dumps(order).encode(), fds)

    def _has_ended(self) -> RuntimeFault:
        return RuntimeFault(f"the gateway of {self._group} has ended; try again")

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        spec = LaunchSpec(
            entry=self._entry,
            payload=pickle.dumps(self._options),
            fds={"link": control.fileno()},
            label=f"{self._group}/gateway",
            title=f"phalanx: {self._group} gateway",
            preload=RELAY_PRELOAD,
        )
        return self._launcher.launch(
            spec,
            on_exit=on_exit,
            deadline=time.monotonic() + _START,
            is_wanted=self._is_wanted,
        )[0]

    def _await_ready(self) -> None:
        wait = LaunchWait(f"{self._group}/gateway", time.monotonic() + _START, self._is_wanted)

        def is_decided() -> bool:
            return bool(self.endpoint or self._failed or self._helper.pid is None)

        with self._changed:
            while not is_decided() and time.monotonic() < wait.deadline:
                wait.check()
                self._changed.wait_for(is_decided, SLICE)
            gone = self._helper.pid is None
            if not self.endpoint or gone:
                why = self._failed or ("it ended" if gone else f"it took more than {_START:g} s")
                raise RuntimeFault(f"the gateway of {self._group} did not start: {why}")

    def _answers(self) -> bool:
        """Whether the process lives and does its work: it may be stopped."""
        if self._helper.is_stopped:
            return False
        self._pings += 1
        number = self._pings
        if not self._send({"ping": number}):
            return False
        with self._changed:
            self._changed.wait_for(
                lambda: self._pong >= number or self._helper.pid is None, _ANSWER
            )
            return self._pong >= number and self._helper.pid is not None

    # --- on the event loop's thread ---------------------------------------------------------

    def _on_message(self, data: bytes, _fds: list[int]) -> None:
        head, _, raw = data.partition(b"\n")
        self._dispatch(json.loads(head), raw)

    def _dispatch(self, head: dict[str, Any], raw: bytes) -> None:  # noqa: ARG002  # for subclasses
        """Take a message of the process, and what came behind it."""
        now = self._loop.time()
        with self._changed:
            match head:
                case {"ready": endpoint, "key": key}:
                    self.endpoint, self.key = endpoint, key
                case {"failed": why}:
                    self._failed = why
                case {"pong": number}:
                    self._pong = number
                case {"up": number, "where": where}:
                    self._connected_relays[where] = number
                    self._invited.pop(where, None)
                case {"down": number, "where": where} if (
                    self._connected_relays.get(where) == number
                ):
                    del self._connected_relays[where]
                case _:
                    pass
            self._changed.notify_all()
        match head:
            case {"refused": why, "address": address}:
                self._refused(address, why)
            case {"malformed": _}:
                self._on_event(MessageMalformed(group=self._group, at=now))
            case _:
                pass

    def _refused(self, address: str, why: str) -> None:
        """Note that a connection was refused."""
        self._on_event(
            PeerRejected(group=self._group, address=address, why=why, at=self._loop.time())
        )

    def _forget_process(self) -> bool:
        """Forget what the last process has said; return whether it was ready."""
        with self._changed:
            was_ready, self.endpoint = bool(self.endpoint), ""
            self._connected_relays.clear()
            self._invited.clear()
            self._changed.notify_all()
        return was_ready

    def _exited(self, pid: int | None, reason: ExitReason) -> bool:
        was_ready = self._forget_process()
        if was_ready and pid is not None:
            self._on_event(
                GatewayExited(group=self._group, pid=pid, reason=reason, at=time.monotonic())
            )
        return False
