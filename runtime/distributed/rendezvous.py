"""Where the ranks of a group meet: a fresh address on loopback for every epoch.

Guarantees: the port is bound before anybody is told of it, and on loopback only; no epoch can read
a key of another; a group that never uses torch.distributed never starts a process for it; the
driver does not import torch. A store that dies is an event, and the next epoch gets a new one.

How: the driver binds and listens; the first rank that connects makes the hub start the store's
process, which is handed the listening socket and finds that rank waiting in it (socket activation,
as inetd did). Later epochs send their sockets to the same process.

Left to others: what a group does when its store dies (`on_event`); the process (`store_main`).
What speaks on the port is torch's TCPStore: it has no authentication, so every user of this
machine can reach it, as with torchrun. phalanx itself sends nothing through it.

Prior art: ``_torchelastic_use_agent_store`` in ``torch/distributed/rendezvous.py``.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from select import EPOLLIN
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.runtime.linux import descriptors
from phalanx.runtime.linux.descriptors import send_with_fds
from phalanx.runtime.process.launcher import LaunchSpec
from phalanx.runtime.process.process import exit_of_process
from phalanx.supervision import ExitReason, RuntimeFault, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.process.launcher import Launcher
    from phalanx.runtime.process.process import Process
    from phalanx.runtime.threads.event_loop import Hub, Watch

_LOOPBACK = "127.0.0.1"
_BACKLOG = 1024  # every rank of a big group may connect before the store's process runs
_START = 60.0  # seconds; a zygote that is still importing torch comes first
_CLOSE = 5.0
_KNOCK = 10.0  # seconds for a connection over loopback that somebody listens for


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and as what the ranks of one epoch meet.

    Attributes:
        prefix: Before every key of this epoch.
        group: The name of the rank group.
    """

    address: str
    port: int
    prefix: str
    epoch: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreExited:
    """The process that held a group's store died while the group still used it.

    Process groups that are formed already go on; ranks that have yet to join this epoch cannot.
    """

    event: ClassVar[str] = "phalanx.store_exited"
    level: ClassVar[str] = "warning"
    group: str
    epoch: int
    pid: int | None
    reason: ExitReason
    at: float


class RendezvousStore:
    """The store of one rank group, through all its epochs. Thread-safe.

    Args:
        launcher: Returns what starts the store's process; asked for only when a rank connects.
        group: The name of the rank group.
        on_event: Told of the store's death. Runs on the hub's thread.
    """

    def __init__(
        self,
        hub: Hub,
        launcher: Callable[[], Launcher],
        *,
        group: str,
        on_event: Callable[[LoggedEvent], None] | None = None,
    ) -> None:
        self._hub = hub
        self._launcher = launcher
        self._group = group
        self._on_event = on_event
        self._lock = threading.Lock()
        self._closed = False
        self._epoch = 0
        self._listener: socket.socket | None = None  # this epoch's, until a process has it
        self._watch: Watch | None = None
        self._link: socket.socket | None = None  # to the process; there before the process is
        self._process: Process | None = None
        self._starter: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The store's process; None while nobody has needed it."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def open(self, epoch: int) -> Rendezvous:
        """Return the meeting place of *epoch*; that of the epoch before is gone from now on.

        Raises:
            SpecError: *epoch* is not above the last one.
            RuntimeFault: Loopback cannot be bound, or this store is closed.
        """
        with self._lock:
            if self._closed:
                msg = f"the rendezvous store of {self._group} is closed"
                raise RuntimeFault(msg)
            if epoch <= self._epoch:
                raise SpecError("epoch", epoch, f"must be above the last one, {self._epoch}")
            listener = _listen()
            self._forget_listener()
            self._epoch = epoch
            port: int = listener.getsockname()[1]
            if self._link is not None and _hand_over(self._link, listener, epoch):
                listener.close()
            else:
                self._listener = descriptors.own(listener)
                self._watch = self._hub.watch(listener.fileno(), EPOLLIN, self._wanted)
        return Rendezvous(_LOOPBACK, port, f"{self._group}/{epoch}/", epoch, self._group)

    def close(self, deadline: float | None = None) -> None:
        """End the store; by force at *deadline* (monotonic). Idempotent."""
        deadline = time.monotonic() + _CLOSE if deadline is None else deadline
        with self._lock:
            self._closed = True
            self._forget_listener()
            link, self._link = self._link, None
            process, self._process = self._process, None
            starter = self._starter
        if link is not None:
            descriptors.close(link)  # the process ends at the end of file
        if starter is not None:
            starter.join(max(0.0, deadline - time.monotonic()))
        if process is not None:
            _end(process, deadline)

    # --- socket activation --------------------------------------------------------------

    def _wanted(self, _events: int) -> None:
        """Start the process: a rank has connected. On the hub's thread, which must not wait."""
        with self._lock:
            if self._watch is None or self._listener is None:
                return
            try:
                link, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except OSError:
                self._forget_listener()  # ranks are refused instead of waiting
                raise
            self._watch.cancel()
            self._watch = None
            self._link = descriptors.own(link)
            # The socket pair keeps the listener until the process is there to take it, so the
            # driver's own copy can go: when the process dies, ranks are refused instead of waiting.
            _hand_over(link, self._listener, self._epoch)
            self._forget_listener()
            self._starter = threading.Thread(
                target=self._start,
                args=(link, child_end, self._epoch),
                name="phalanx-store-start",
                daemon=True,
            )
            self._starter.start()

    def _start(self, link: socket.socket, child_end: socket.socket, epoch: int) -> None:
        spec = LaunchSpec(
            entry="phalanx.runtime.distributed.store_main:main",
            fds={"link": child_end.fileno()},
            label=f"{self._group}/store#{epoch}",
            title=f"phalanx: {self._group} store",
        )
        try:
            process = self._launcher().launch(
                spec,
                on_exit=lambda process: self._exited(process, link),
                deadline=time.monotonic() + _START,
                is_wanted=lambda: self._link is link,
            )
        except Exception as error:  # noqa: BLE001  # reported: there is no caller to raise to
            self._lost(link, None, exit_of_process(1, None, asked=False, detail=str(error)))
            return
        finally:
            child_end.close()
        with self._lock:
            wanted = self._link is link
            if wanted:
                self._process = process
        if not wanted:  # closed, or dead again, while it was starting
            _end(process, time.monotonic() + _CLOSE)

    def _exited(self, process: Process, link: socket.socket) -> None:
        status = process.status
        reason = exit_of_process(
            None if status is None else status.code,
            None if status is None else status.signal,
            asked=False,
        )
        self._lost(link, process, reason)

    def _lost(self, link: socket.socket, process: Process | None, reason: ExitReason) -> None:
        with self._lock:
            if self._link is not link:
                return  # told to end
            self._link = None
            registered, self._process = self._process, None
            epoch = self._epoch
        descriptors.close(link)
        if registered is not None:
            registered.close()
        if self._on_event is not None:
            self._on_event(
                StoreExited(
                    group=self._group,
                    epoch=epoch,
                    pid=None if process is None else process.pid,
                    reason=reason,
                    at=time.monotonic(),
                )
            )

    def _forget_listener(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._listener is not None:
            descriptors.close(self._listener)
            self._listener = None


def rendezvous_environment(
    rendezvous: Rendezvous,
    rank: int,
    local_rank: int,
    world_size: int,
    *,
    local_world_size: int | None = None,
    given: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return what torchrun would set, so that ``env://`` works in a worker.

    Args:
        local_world_size: Ranks on this machine; None says all of them.
        given: What is set already; decides whether gloo and NCCL are told to stay on loopback.
    """
    local = world_size if local_world_size is None else local_world_size
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": rank,
        "ROLE_NAME": rendezvous.group,
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": rendezvous.port,
        "TORCHELASTIC_RESTART_COUNT": rendezvous.epoch,
        "TORCHELASTIC_RUN_ID": rendezvous.group,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    environment = {name: str(value) for name, value in variables.items()}
    if local == world_size:
        # By the host's name they would listen on whatever interface that resolves to, or find none
        # at all in a sandbox without a network.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if not given.get(name):
                environment[name] = "lo"
    return environment


def init_process_group(
    backend: str,
    rendezvous: Rendezvous | None,
    rank: int,
    world_size: int,
    *,
    timeout: Any = None,
    **options: Any,
) -> None:
    """Join the process group of an epoch; in a worker.

    Args:
        timeout: For joining and for each collective: seconds, or a `timedelta`. None takes torch's
            own.
        options: Passed on to `torch.distributed.init_process_group`.

    Raises:
        RuntimeFault: There is nowhere to meet.
    """
    # Here, for it is needed in workers only; by name, for torch's types hide its stores.
    dist: Any = import_module("torch.distributed")

    if rendezvous is None and world_size != 1:
        msg = f"rank {rank} of {world_size} has no rendezvous to meet the others at"
        raise RuntimeFault(msg)
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        if rendezvous is None:
            store = dist.HashStore()  # launch="inline": alone, it meets nobody
        else:
            _knock(rendezvous)
            server = dist.TCPStore(
                rendezvous.address,
                rendezvous.port,
                is_master=False,
                wait_for_workers=False,
                **limits,
            )
            store = dist.PrefixStore(rendezvous.prefix, server)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            **limits,
            **options,
        )
    except Exception as error:
        error.add_note(f"while rank {rank} of {world_size} joined {rendezvous}")
        raise


def _knock(rendezvous: Rendezvous) -> None:
    """Raise where nobody listens any more: torch's client would try again until its timeout.

    So a rank that comes too late for an epoch hears of it at once, and can join the next.
    """
    where = (rendezvous.address, rendezvous.port)
    try:
        socket.create_connection(where, _KNOCK).close()
    except OSError as error:
        msg = f"epoch {rendezvous.epoch} of {rendezvous.group} is over: {where} does not answer"
        if error.errno == errno.ENETUNREACH:
            msg = f"{rendezvous.address} cannot be reached: bring loopback up (ip link set lo up)"
        raise RuntimeFault(msg) from error


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((_LOOPBACK, 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        msg = f"cannot listen on {_LOOPBACK}: {error}; is the loopback interface up?"
        raise RuntimeFault(msg) from error
    return listener


def _hand_over(link: socket.socket, listener: socket.socket, epoch: int) -> bool:
    """Send the listening socket of *epoch*; False where the process is gone."""
    with suppress(OSError):
        send_with_fds(link, b"%d" % epoch, [listener.fileno()], socket.MSG_DONTWAIT)
        return True
    return False


def _end(process: Process, deadline: float) -> None:
    if not process.wait(deadline):
        process.kill_tree(time.monotonic() + _CLOSE)
    process.close()
