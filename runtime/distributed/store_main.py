"""The process that holds the torch.distributed store of a group.

- One epoch at a time: at the next listening socket the store of the last epoch, its keys and its
  connections are closed.
- It exits at end of file of its control socket.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.runtime.linux.descriptors import receive_with_fds

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONNECT = timedelta(seconds=30)  # to itself, over loopback; arbitrary


def main(_payload: bytes, fds: Mapping[str, int]) -> int:
    """Serve the epochs that come over the control socket; return the exit code."""
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
            address, port = copy.getsockname()
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
