"""Serve a read-only page of a running driver.

Serves a live page of supervisors, groups, ranks, events and crash reports, and
the same as /state.json, without authentication.

Exit codes:
  0  the driver that was named by its pid has ended
  1  there is no such process, or the port cannot be had
  2  the command line is invalid
  130  Ctrl-C

Examples:
  phalanx web trainer --port 9465
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.integrations.follower import service

from .http_server import PageServer
from .live_view import LiveView

if TYPE_CHECKING:
    import argparse

_PORT = 9465


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    service.add_arguments(parser, _PORT)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the driver that was named by its pid has ended, or the user has enough."""
    view = LiveView()
    follower = service.follow(view, arguments.driver)
    listener = service.listen(arguments.host, arguments.port)
    with PageServer(listener, arguments.host, view) as server:
        print(f"serving {service.url_of(listener)}/", flush=True)  # noqa: T201
        service.serve(server, follower)
    return 0
