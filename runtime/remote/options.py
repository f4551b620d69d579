"""`Zmq`: options of the transport to remote ranks, checked when they are built.

Guarantees: every value is valid, and uses no interface that the user has not named: by
default everything listens on loopback.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from phalanx.supervision import SpecError, check_seconds

_LOOPBACK = "tcp://127.0.0.1"
_HEARTBEAT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Zmq:
    """Messages over ZeroMQ, for ranks that share no memory with the driver.

    Both sides authenticate (CURVE): the group has a key pair, and so has each relay beside its
    ranks; any other connection is refused.

    Attributes:
        bind: Where the driver's side listens: ``tcp://ADDRESS`` or ``tcp://ADDRESS:PORT``, where
            the address is an IP address or an interface's name. Without a port a free one is
            taken. An address beyond loopback is listened on only if it is given here.
        advertise: The address that relays connect to, as ``tcp://HOST:PORT``, if that is
            another one than the bound address: behind a forwarder, or for ``tcp://*``. None
            connects to the bound address.
        ipc: Use a Unix socket, to which only this user's processes can connect, in place of *bind*.
        heartbeat: Seconds between signs of life on a link that has nothing else to carry.
        lost_after: Seconds of silence after which a link is lost; its rank then ends as a hung one
            does, reason ``unresponsive``. At least twice the heartbeat.
    """

    bind: str = _LOOPBACK
    advertise: str | None = None
    ipc: bool = False
    heartbeat: float = _HEARTBEAT
    lost_after: float = 10.0

    def __post_init__(self) -> None:
        check_seconds("transport.heartbeat", self.heartbeat, positive=True)
        check_seconds("transport.lost_after", self.lost_after, positive=True)
        if self.lost_after < 2 * self.heartbeat:
            if self.heartbeat == _HEARTBEAT:
                remedy = f"give at least two heartbeats, {2 * _HEARTBEAT:g} s"
                raise SpecError("transport.lost_after", self.lost_after, remedy)
            remedy = f"give at most half of lost_after={self.lost_after:g}, or a greater lost_after"
            raise SpecError("transport.heartbeat", self.heartbeat, remedy)
        if self.ipc:
            if self.bind != _LOOPBACK or self.advertise is not None:
                raise SpecError("transport.ipc", self.ipc, "give either it or bind and advertise")
            return
        host, own_port = _endpoint("transport.bind", self.bind)
        if self.advertise is not None:
            named, port = _endpoint("transport.advertise", self.advertise)
            if not port or _is_wildcard(named):
                raise SpecError(
                    "transport.advertise", self.advertise, "give the host and the port to reach"
                )
            if not own_port:
                # A port that is chosen at each start cannot be advertised.
                raise SpecError(
                    "transport.bind", self.bind, "name the port that advertise leads to"
                )
        elif _is_wildcard(host):
            raise SpecError(
                "transport.bind", self.bind, "say in advertise= which address ranks shall reach"
            )

    @property
    def listens_on(self) -> str:
        """The address to bind, with a star for a port that is to be chosen; empty for ipc."""
        if self.ipc:
            return ""
        host, port = _endpoint("transport.bind", self.bind)
        return f"tcp://{host}:{port or '*'}"


Transport = Literal["local", "zmq"] | Zmq


def check_transport(transport: object) -> Zmq | None:
    """Return the options of *transport*; None for ranks on this machine.

    Raises:
        SpecError: it is neither ``"local"`` nor ``"zmq"`` nor a `Zmq`.
    """
    if transport == "local":
        return None
    if transport == "zmq":
        return Zmq()
    if isinstance(transport, Zmq):
        return transport
    raise SpecError("transport", transport, "give 'local', 'zmq', or a phalanx.runtime.Zmq")


def _endpoint(field: str, value: object) -> tuple[str, int]:
    """Return the host and the port in *value*; port 0 where there is none."""
    text = value if isinstance(value, str) else ""
    scheme, _, rest = text.partition("://")
    host, colon, port = rest.rpartition(":")
    if not colon or "]" in port:  # an address of version 6 has colons of its own
        host, port = rest, ""
    bad = scheme != "tcp" or not host or any(c.isspace() or c in "/;\0" for c in rest)
    if host.startswith("["):
        bad = bad or not _is_address(host[1:-1]) or not host.endswith("]")
    elif ":" in host:
        raise SpecError(field, value, "put an IPv6 address into brackets: tcp://[::1]:5555")
    if bad or (port and not (port == "*" or (port.isdigit() and int(port) < 65536))):
        raise SpecError(field, value, "write tcp://ADDRESS or tcp://ADDRESS:PORT")
    return host, int(port) if port.isdigit() else 0


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_wildcard(host: str) -> bool:
    address = host.strip("[]")
    return host == "*" or (_is_address(address) and ipaddress.ip_address(address).is_unspecified)
