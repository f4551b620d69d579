"""The rendezvous of a rank group: a fresh port for every epoch.

- The port is bound before its number is passed on, on loopback only, unless ranks are on
  other machines. No epoch can read a key of another. The driver does not import torch.
- A group that never uses torch.distributed starts no process: the driver listens, and the first
  rank that connects makes it start the store's process and pass it the listening socket, with that
  rank waiting in it (socket activation). Later epochs send their sockets to the same process.
- That process serves one epoch at a time: at the next socket the store of the last epoch, its keys
  and its connections are closed. It exits at end of file of its control socket.
- A store that exits is an event, and the next epoch gets a new one, as it does if the process is
  stopped (SIGSTOP). The process ignores SIGINT, SIGTERM and SIGHUP.

The port is served by torch's TCPStore, which has no authentication: every user of this machine can
reach it, and on a cluster every machine that reaches its address, as with torchrun. phalanx itself
sends nothing through it.

Prior art: ``_torchelastic_use_agent_store`` in ``torch/distributed/rendezvous.py``.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from select import EPOLLIN
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from phalanx.runtime.event import Event, LoggedEvent, discard_event
from phalanx.runtime.linux import descriptors
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.process.child_main import LaunchSpec
from phalanx.runtime.process.helper import Helper
from phalanx.supervision import ExitReason, RuntimeFault, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from phalanx.runtime.process.child_process import Process
    from phalanx.runtime.process.launcher import Launcher
    from phalanx.runtime.threads.event_loop import EventLoop, Watch

_LOOPBACK = "127.0.0.1"
_BACKLOG = 1024  # every rank of a big group may connect before the store's process runs
_START = 60.0  # seconds; a zygote that is still importing torch comes first
_CLOSE = 5.0
_CONNECT = timedelta(seconds=30)  # of the store to itself, over loopback; arbitrary
_PROBE_TIMEOUT = 10.0  # seconds for a connection over loopback
_ATTEMPT = timedelta(seconds=1)  # then the port is checked again


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a rank among the nodes that have ranks.

    Attributes:
        node: The number of its node, among all that there have been.
        host: The name of the machine.
        local_rank: Its number among the ranks there.
        local_size: How many those are.
        index: The number of its node among those that have ranks.
        nodes: How many those are.
    """

    node: int
    host: str
    local_rank: int
    local_size: int
    index: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of one epoch's ranks: address, port and key prefix.

    Attributes:
        prefix: Before every key of this epoch.
    """

    address: str
    port: int
    prefix: str
    epoch: int
    group: str


class StoreExited(Event, event="store_exited", level="warning"):
    """The process that held a group's store died while the group still used it.

    Process groups that are formed already go on; ranks that have yet to join this epoch cannot.
    """

    group: str
    epoch: int
    pid: int | None
    reason: ExitReason


class RendezvousStore:
    """The store of one rank group, through all its epochs. Thread-safe.

    Args:
        launcher: Starts the store's process once a rank connects.
        preload: Of the zygote that it is forked from; None for the launcher's own.
        asked_env: As in `LaunchSpec`.
        on_event: Called with the store's exit, on the event loop's thread.
    """

    def __init__(
        self,
        loop: EventLoop,
        launcher: Launcher,
        *,
        preload: Sequence[str] | None = None,
        asked_env: Mapping[str, str] = MappingProxyType({}),
        group: str,
        on_event: Callable[[LoggedEvent], None] = discard_event,
    ) -> None:
        self._loop = loop
        self._launcher = launcher
        self._preload = preload
        self._asked_env = asked_env
        self._group = group
        self._on_event = on_event
        self._epoch = 0
        self._listener: socket.socket | None = None  # this epoch's, until a process has it
        self._watch: Watch | None = None
        self._helper = Helper(
            loop, f"store of {group}", self._spawn, on_exit=self._exited, replay=self._replay
        )

    @property
    def pid(self) -> int | None:
        """The store's process; None while no rank has needed it."""
        return self._helper.pid

    def open(self, epoch: int, address: str = _LOOPBACK) -> Rendezvous:
        """Return the meeting place of *epoch*; that of the epoch before is gone from now on.

        Args:
            address: The IP address of this machine on which it listens.

        Raises:
            SpecError: *epoch* is not above the last one.
            RuntimeFault: *address* cannot be bound, or this store is closed.
        """
        if self._helper.is_stopped:  # it would take the listener, and serve no rank
            self._helper.end(time.monotonic() + _CLOSE)
        with self._helper.lock:
            if self._helper.closed:
                raise RuntimeFault(f"the rendezvous store of {self._group} is closed")
            if epoch <= self._epoch:
                raise SpecError("epoch", epoch, f"must be above the last one, {self._epoch}")
            listener = _listen(address)
            self._forget_listener()
            self._epoch = epoch
            port: int = listener.getsockname()[1]
            if self._helper.send(b"%d" % epoch, [listener.fileno()]):
                listener.close()
            else:
                self._listener = descriptors.own(listener)
                self._watch = self._loop.watch(listener.fileno(), EPOLLIN, self._wanted)
        return Rendezvous(address, port, f"{self._group}/{epoch}/", epoch, self._group)

    def close(self, deadline: float | None = None) -> None:
        """End the store; by force at *deadline* (monotonic). Idempotent."""
        deadline = time.monotonic() + _CLOSE if deadline is None else deadline
        with self._helper.lock:
            self._forget_listener()
        with suppress(RuntimeFault):  # what could not be ended the launcher names when it closes
            self._helper.close(deadline, ask=True)  # the process exits at end of file

    # --- socket activation --------------------------------------------------------------

    def _wanted(self, _events: int) -> None:
        with self._helper.lock:
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None
                self._helper.start_soon()

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        spec = LaunchSpec(
            entry="phalanx.runtime.distributed.rendezvous:serve",
            fds={"control": control.fileno()},
            label=f"{self._group}/store#{self._epoch}",
            title=f"phalanx: {self._group} store",
            preload=self._preload,
            asked_env=self._asked_env,
        )
        return self._launcher.launch(
            spec,
            on_exit=on_exit,
            deadline=time.monotonic() + _START,
            is_wanted=lambda: not self._helper.closed,
        )[0]

    def _replay(self) -> Iterator[tuple[bytes, list[int]]]:
        if self._listener is not None:
            yield b"%d" % self._epoch, [self._listener.fileno()]
            # The process alone holds it from now on: when it exits, ranks are refused at once.
            self._forget_listener()

    def _exited(self, pid: int | None, reason: ExitReason) -> bool:
        with self._helper.lock:
            if pid is None and self._watch is None:  # it could not be started for its ranks
                self._forget_listener()
            # Else there is one if the next epoch was opened before this exit was reported.
            is_awaited = self._listener is not None and self._watch is None
            epoch = self._epoch - (self._listener is not None)
        self._on_event(
            StoreExited(group=self._group, epoch=epoch, pid=pid, reason=reason, at=time.monotonic())
        )
        return is_awaited

    def _forget_listener(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._listener is not None:
            descriptors.close(self._listener)
            self._listener = None


def serve(_payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve the epochs that come over the control socket; return the exit code of this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # ranks join until the driver lets go
    # Warm where a zygote forked us; by name, for torch's types hide its stores.
    dist: Any = import_module("torch.distributed")
    control = socket.socket(fileno=fds["control"])
    serving: list[Any] = []  # a store serves as long as it is held
    while True:
        message, listeners = receive_with_fds(control, 32, 1)
        if not message:
            return 0
        serving.clear()  # first: no rank may find the old one alive beside the new one
        with socket.socket(fileno=os.dup(listeners[0])) as copy:
            address, port = copy.getsockname()[:2]
        serving.append(
            dist.TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_CONNECT,
                master_listen_fd=listeners[0],  # the store's to close from here on
            )
        )


def rendezvous_environment(
    rendezvous: Rendezvous,
    rank: int,
    world_size: int,
    place: Place | None = None,
) -> dict[str, str]:
    """Return what torchrun would set, so that ``env://`` works in a worker.

    On this machine, where *place* is None, gloo and NCCL are kept on loopback unless the driver's
    environment names their interface: by the host's name they would listen on whatever interface
    that resolves to, or find none at all in a sandbox without a network. On a node they take the
    one that leads to the driver.
    """
    at = Place(0, "", rank, world_size, 0, 1) if place is None else place
    variables = {
        "RANK": rank,
        "LOCAL_RANK": at.local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": at.local_size,
        "GROUP_RANK": at.index,
        "GROUP_WORLD_SIZE": at.nodes,
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
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if place is None and not os.environ.get(name):
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
        raise RuntimeFault(f"rank {rank} of {world_size} has no rendezvous address")
    if isinstance(timeout, int | float):
        timeout = timedelta(seconds=timeout)
    limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        if rendezvous is None:
            store = dist.HashStore()  # launch="inline": a group of one
        else:
            store = dist.PrefixStore(rendezvous.prefix, _client(dist, rendezvous, timeout))
        ranks = {"rank": rank, "world_size": world_size}
        dist.init_process_group(backend, store=store, **ranks, **limits, **options)
    except Exception as error:
        error.add_note(f"while rank {rank} of {world_size} joined {rendezvous}")
        raise


def _client(dist: Any, rendezvous: Rendezvous, timeout: timedelta | None) -> Any:
    """Connect to an epoch's store; raise once it is closed.

    torch's client repeats a failed attempt until its timeout, even if the port is closed, and a
    rank cannot join the next epoch meanwhile. So each attempt is short, and the port is checked
    before it.
    """
    where = (rendezvous.address, rendezvous.port)
    limit = dist.constants.default_pg_timeout if timeout is None else timeout
    until = time.monotonic() + limit.total_seconds()
    while True:
        _check_listening(rendezvous)
        try:
            client = dist.TCPStore(
                *where, is_master=False, wait_for_workers=False, timeout=min(_ATTEMPT, limit)
            )
        except dist.DistNetworkError:
            if time.monotonic() >= until:
                raise
        else:
            client.set_timeout(limit)
            return client


def _check_listening(rendezvous: Rendezvous) -> None:
    """Raise if no store listens."""
    where = (rendezvous.address, rendezvous.port)
    try:
        socket.create_connection(where, _PROBE_TIMEOUT).close()
    except OSError as error:
        if error.errno == errno.ENETUNREACH:
            problem = (
                f"{rendezvous.address} cannot be reached: bring loopback up (ip link set lo up)"
            )
        else:
            problem = (
                f"epoch {rendezvous.epoch} of {rendezvous.group} is over: "
                f"{where} does not answer: {error}"
            )
        raise RuntimeFault(problem) from error


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise RuntimeFault(f"cannot listen on {address}: {error}; is its interface up?") from error
