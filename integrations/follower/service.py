"""The common part of commands that serve a driver: arguments, listening socket, serving."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from phalanx.supervision import RuntimeFault, SpecError

from .follower import Follower, StreamConsumer

if TYPE_CHECKING:
    import argparse
    from socketserver import BaseServer

_WHOSE = (errno.EADDRINUSE, errno.EACCES)
_A = TypeVar("_A", bound=StreamConsumer)


def add_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    """Have *parser* take which driver is followed, and where it is served; *port* by default."""
    add = parser.add_argument
    whom = (
        "pid of the driver, with which this ends; or its name, under which those that follow it "
        "are found too; may be left out if only one is running"
    )
    add("driver", nargs="?", default="", help=whom)
    add("--port", type=int, default=port, help=f"TCP port; 0 is any free one ({port})")
    add("--host", default="127.0.0.1", help="address of the interface (127.0.0.1)")


def follow(consumer: _A, driver: str) -> Follower[_A]:
    """Return what follows *driver*, a pid or a name, for *consumer*."""
    if driver.isascii() and driver.isdigit():
        return Follower(consumer, pid=int(driver))
    return Follower(consumer, name=driver)


def listen(host: Any, port: Any) -> socket.socket:
    """Return a socket that listens at *port* of *host*; 0 is any free one.

    Raises:
        SpecError: there is no such address on this machine, or no such port.
        RuntimeFault: the port is in use, or not for this user.
    """
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16:
        raise SpecError("port", port, "give 0 to 65535; 0 is any free one")
    if not isinstance(host, str) or not host:
        raise SpecError("host", host, "name an interface by its address; 0.0.0.0 is all of IPv4's")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:  # also: a name that cannot be resolved, or is none
        if isinstance(error, OSError) and error.errno in _WHOSE:
            why = os.strerror(error.errno or 0).lower()
            msg = f"port {port} of {host} cannot be had ({why}): name another, or 0 for a free one"
            raise RuntimeFault(msg) from error
        # What the socket module adds to the system's words is said here already.
        why = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        remedy = f"this machine has no such address ({why}); give 127.0.0.1 or 0.0.0.0"
        raise SpecError("host", host, remedy) from error


def is_own_name(header: str, host: str) -> bool:
    """Return whether *header*, that is ``Host``, has an address, ``localhost`` or *host*.

    Else a page of another site, whose name has been pointed here, could read what is answered.
    """
    name = ""
    with suppress(ValueError):  # else it is no address
        name = urlsplit(f"//{header}").hostname or ""
        ipaddress.ip_address(name)
        return True
    return name in ("localhost", host.lower())


def url_of(listener: socket.socket) -> str:
    """Return the address of what listens at *listener*, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(server: BaseServer, follower: Follower[Any]) -> None:
    """Have *server* answer, on another thread, while *follower* has a driver to follow."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        follower.run()
    finally:
        server.shutdown()
        thread.join()
