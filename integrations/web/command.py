"""``phalanx web``: a page of a running driver, from a process of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from phalanx.integrations.prometheus.follower import Follower
from phalanx.integrations.prometheus.listener import listen

from .http_server import PageServer
from .live_view import LiveView

if TYPE_CHECKING:
    import argparse

_PORT = 9465


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add = parser.add_argument
    whom = (
        "pid of the driver, with which this ends; or its name, under which those that follow it "
        "are found too; may be left out if only one is running"
    )
    add("driver", nargs="?", default="", help=whom)
    add("--port", type=int, default=_PORT, help=f"TCP port; 0 is any free one ({_PORT})")
    add("--host", default="127.0.0.1", help="address of the interface (127.0.0.1)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until the driver that was named by its pid has ended, or the user has enough."""
    view, driver = LiveView(), arguments.driver
    whom: dict[str, Any] = {"pid": int(driver)} if driver.isdigit() else {"name": driver}
    follower = Follower(view, **whom)
    listener = listen(arguments.host, arguments.port)
    with PageServer(listener, arguments.host, view) as server:
        host, port = listener.getsockname()[:2]
        print(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/", flush=True)  # noqa: T201
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            follower.run()
        finally:
            server.shutdown()
    return 0
