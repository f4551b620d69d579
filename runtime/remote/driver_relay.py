"""The driver's hold on the process through which it reaches ranks elsewhere.

Guarantees: there is one per group, started when it is first needed; one that has died, or no
longer answers, is replaced at the next start of ranks, and its death is an event; secrets reach it
and the ranks' sides over inherited descriptors alone.

Left to others: what the process does (`gateway_main`), the other end (`outpost`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from select import EPOLLIN
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.runtime.linux import descriptors
from phalanx.runtime.process.launcher import LaunchSpec
from phalanx.runtime.process.process import exit_of_process
from phalanx.runtime.process.zygote import LOOK, Vigil, always
from phalanx.supervision import ExitReason, RuntimeFault

from .worker_relay import Posting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.process.launcher import Launcher
    from phalanx.runtime.process.process import Process
    from phalanx.runtime.threads.event_loop import Hub, Watch

    from .options import Zmq

_START = 60.0  # seconds; a zygote that is still importing comes first
_ANSWER = 5.0  # seconds to answer at all
_CLOSE = 5.0
_MESSAGE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayExited:
    """The process between a driver and its ranks elsewhere died while it was in use.

    With it all links are lost, and their ranks are restarted.
    """

    event: ClassVar[str] = "phalanx.gateway_exited"
    level: ClassVar[str] = "error"
    group: str
    pid: int
    reason: ExitReason
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrangerRefused:
    """Somebody who is no rank of this group tried to connect; told once for each kind.

    Attributes:
        address: Where it came from; empty where that is not known.
    """

    event: ClassVar[str] = "phalanx.stranger_refused"
    level: ClassVar[str] = "warning"
    group: str
    address: str
    why: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMalformed:
    """A link brought what was no message; it was dropped. Told once."""

    event: ClassVar[str] = "phalanx.message_malformed"
    level: ClassVar[str] = "warning"
    group: str
    at: float


class _Life:
    """One process, from its start to its end."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.endpoint = ""
        self.key = ""
        self.failed = ""
        self.pong = 0
        self.gone = False
        self.process: Process | None = None
        self.watch: Watch | None = None


class Gateway:
    """The process of one group, through all its lives. `open` and `berth`: one thread at a time.

    Args:
        launcher: Returns what starts the process; asked for only when ranks are started.
        on_event: Told of what happens to it. Runs on the hub's thread.
    """

    def __init__(
        self,
        hub: Hub,
        launcher: Callable[[], Launcher],
        options: Zmq,
        *,
        group: str,
        on_event: Callable[[LoggedEvent], None],
    ) -> None:
        self._hub = hub
        self._launcher = launcher
        self._options = options
        self._group = group
        self._on_event = on_event
        self._changed = threading.Condition()
        self._life: _Life | None = None
        self._numbers = 0
        self._pings = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process; None where there is none just now."""
        with self._changed:
            process = None if self._life is None else self._life.process
            return None if process is None else process.pid

    def open(self, is_wanted: Callable[[], bool] = always) -> None:
        """Have the process there, and answering; given up where *is_wanted* returns False.

        Raises:
            RuntimeFault: it cannot be started, or not listen where it should.
        """
        with self._changed:
            life = self._life
        if life is not None and not self._answers(life):
            self._give_up(life)
            life = None
        if life is None:
            self._start(is_wanted)

    def berth(self, fds: Mapping[str, int]) -> Posting:
        """Make room for one rank behind *fds*; return what its side must know.

        Raises:
            RuntimeFault: the process has just died.
        """
        life = self._life
        if life is None:
            raise RuntimeFault(f"the gateway of {self._group} has ended; try again")
        self._numbers += 1
        secret = os.urandom(32)
        route = b"\1" + secrets.token_bytes(15)  # ZeroMQ keeps names that begin with 0 for itself
        order = {
            "berth": self._numbers,
            "secret": secret.hex(),
            "route": route.hex(),
            "fds": list(fds),
        }
        try:
            socket.send_fds(life.link, [json.dumps(order).encode()], list(fds.values()))
        except OSError as error:
            raise RuntimeFault(f"the gateway of {self._group} has ended: {error}") from error
        return Posting(
            endpoint=life.endpoint,
            server_key=life.key,
            secret=secret,
            route=route,
            heartbeat=self._options.heartbeat,
            lost_after=self._options.lost_after,
        )

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._changed:
            self._closed = True
            life, self._life = self._life, None
        if life is not None:
            self._end(life)

    # --- starting -----------------------------------------------------------------------

    def _start(self, is_wanted: Callable[[], bool]) -> None:
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors.own(link)
        life = _Life(link)
        spec = LaunchSpec(
            entry="phalanx.runtime.remote.driver_relay_main:main",
            payload=pickle.dumps(self._options),
            fds={"link": theirs.fileno()},
            label=f"{self._group}/gateway",
            title=f"phalanx: {self._group} gateway",
        )
        deadline = time.monotonic() + _START
        with self._changed:
            self._life = life
        try:
            life.process = self._launcher().launch(
                spec,
                on_exit=lambda process: self._exited(life, process),
                deadline=deadline,
                is_wanted=is_wanted,
            )
            life.watch = self._hub.watch(link.fileno(), EPOLLIN, lambda _: self._hear(life))
            self._await_ready(life, deadline, is_wanted)
        except BaseException:
            self._give_up(life)
            raise
        finally:
            theirs.close()

    def _await_ready(self, life: _Life, deadline: float, is_wanted: Callable[[], bool]) -> None:
        vigil = Vigil(f"{self._group}/gateway", is_wanted)
        with self._changed:
            while time.monotonic() < deadline:
                vigil.check()
                if self._changed.wait_for(lambda: life.endpoint or life.failed or life.gone, LOOK):
                    break
        if not life.endpoint:
            why = life.failed or ("it ended" if life.gone else f"it took more than {_START:g} s")
            raise RuntimeFault(f"the gateway of {self._group} did not start: {why}")

    def _answers(self, life: _Life) -> bool:
        """Whether the process lives and does its work: it may be stopped."""
        if life.process is not None and life.process.is_stopped():
            return False
        self._pings += 1
        number = self._pings
        try:
            life.link.send(json.dumps({"ping": number}).encode(), socket.MSG_DONTWAIT)
        except OSError:
            return False
        with self._changed:
            self._changed.wait_for(lambda: life.pong >= number or life.gone, _ANSWER)
            return life.pong >= number and not life.gone

    # --- hearing, on the hub's thread -----------------------------------------------------

    def _hear(self, life: _Life) -> None:
        while True:
            try:
                data = life.link.recv(_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                if life.watch is not None:
                    life.watch.cancel()
                return  # its death is told by its process
            self._heard(life, json.loads(data))

    def _heard(self, life: _Life, message: dict[str, Any]) -> None:
        now = time.monotonic()
        with self._changed:
            life.endpoint = message.get("ready", life.endpoint)
            life.key = message.get("key", life.key)
            life.failed = message.get("failed", life.failed)
            life.pong = message.get("pong", life.pong)
            self._changed.notify_all()
        if "refused" in message:
            self._on_event(
                StrangerRefused(
                    group=self._group, address=message["address"], why=message["refused"], at=now
                )
            )
        elif "malformed" in message:
            self._on_event(MessageMalformed(group=self._group, at=now))

    def _exited(self, life: _Life, process: Process) -> None:
        with self._changed:
            life.gone = True
            unasked = self._life is life
            if unasked:
                self._life = None
            self._changed.notify_all()
        if not unasked:
            return
        if life.endpoint:
            status = process.status
            code = None if status is None else status.code
            number = None if status is None else status.signal
            reason = exit_of_process(code, number, asked=False)
            self._on_event(
                GatewayExited(
                    group=self._group, pid=process.pid, reason=reason, at=time.monotonic()
                )
            )
        self._forget(life)
        process.close()

    # --- ending -------------------------------------------------------------------------

    def _give_up(self, life: _Life) -> None:
        """End a process that is of no use."""
        with self._changed:
            if self._life is life:
                self._life = None
        self._end(life, patience=0.0)

    def _end(self, life: _Life, patience: float = _CLOSE) -> None:
        self._forget(life)  # it ends at the end of file
        process = life.process
        if process is not None:
            patience = 0.0 if process.is_stopped() else patience
            if not process.wait(time.monotonic() + patience):
                process.kill_tree(time.monotonic() + _CLOSE)
            process.close()

    def _forget(self, life: _Life) -> None:
        if life.watch is not None:
            life.watch.cancel()
        if life.link.fileno() >= 0:
            with contextlib.suppress(OSError):
                descriptors.close(life.link)
