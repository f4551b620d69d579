"""Finds the network interface of an address, for gloo and NCCL; checks that peers are reached."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ATTEMPT = 1.0  # seconds
_REQUEST = struct.Struct("256s")


def interface_of(address: str) -> str:
    """Return the name of the interface that has *address*; empty if none is found."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none of this version
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, _REQUEST.pack(name.encode()))
                if answer[20:24] == wanted.packed:
                    return name
    return ""


def why_unreached(endpoint: str) -> str:
    """Return why *endpoint*, ``tcp://HOST:PORT``, takes no connection; empty if it takes one."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
