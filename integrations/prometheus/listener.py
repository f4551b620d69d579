"""The listening socket of a metrics server."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from phalanx.supervision import RuntimeFault, SpecError

_WHOSE = (errno.EADDRINUSE, errno.EACCES)


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
    except OSError as error:  # a name that cannot be resolved is one too
        if error.errno in _WHOSE:
            why = os.strerror(error.errno or 0).lower()
            msg = f"port {port} of {host} cannot be had ({why}): name another, or 0 for a free one"
            raise RuntimeFault(msg) from error
        remedy = f"this machine has no such address ({error.strerror}); give 127.0.0.1 or 0.0.0.0"
        raise SpecError("host", host, remedy) from error
