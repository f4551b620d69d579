"""The process that serves: follows a driver in its main thread, answers HTTP in others."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from .account import DriverAccount
from .follower import Follower
from .http_server import make_server

if TYPE_CHECKING:
    from collections.abc import Mapping


def serve(
    listener: socket.socket, follower: Follower[DriverAccount], labels: Mapping[str, str]
) -> None:
    """Serve what *follower* hears on *listener*, until it has nothing to follow."""
    with make_server(listener, follower, labels) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            follower.run()
        finally:
            server.shutdown()


def main() -> None:
    """Serve the driver and the descriptor that the command line names; for `MetricsServer`."""
    pid, fd, labels = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to act on
    if os.getppid() == pid:  # else it has ended, and its number may be another's
        serve(socket.socket(fileno=fd), Follower(DriverAccount(), pid=pid), labels)
