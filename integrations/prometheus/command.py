"""Serve metrics and health routes of a running driver for Prometheus.

Serves /metrics, /healthz and /readyz over HTTP from outside of the driver.
Needs the extra phalanx[prometheus]. Guide: docs/reference/metrics.md.

Exit codes:
  0  the driver that was named by its pid has ended, or a file was printed
  1  there is no such process, the port cannot be had, or the extra is not installed
  2  the command line is invalid
  130  Ctrl-C

Examples:
  phalanx metrics trainer --port 9464 --label job=nightly
  phalanx metrics --print alerts > alerts.yml
"""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import TYPE_CHECKING

from phalanx.integrations.follower import service
from phalanx.supervision import SpecError

from .driver_metrics import DriverMetrics
from .server import DEFAULT_PORT, check_installed

if TYPE_CHECKING:
    import argparse

_FILES = {"alerts": "alerts.yml", "dashboard": "dashboard.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    service.add_arguments(parser, DEFAULT_PORT)
    add = parser.add_argument
    add("--label", action="append", default=[], metavar="NAME=VALUE", help="added to every metric")
    add("--print", choices=sorted(_FILES), help="print the alert rules or the dashboard, and end")


def run(arguments: argparse.Namespace) -> int:
    """Serve until the driver that was named by its pid has ended, or the user has enough."""
    if arguments.print:
        folder = files("phalanx.integrations.prometheus")
        sys.stdout.write((folder / _FILES[arguments.print]).read_text())
        return 0
    check_installed()
    from .http_server import make_server  # noqa: PLC0415  # as above
    from .metric_definitions import check_labels  # noqa: PLC0415  # needs prometheus_client

    labels: dict[str, str] = {}
    for each in arguments.label:
        name, equals, value = each.partition("=")
        if not equals or name in labels:
            raise SpecError("--label", each, "give NAME=VALUE, each name once")
        labels[name] = value
    check_labels(labels)
    follower = service.follow(DriverMetrics(), arguments.driver)
    listener = service.listen(arguments.host, arguments.port)
    with make_server(listener, arguments.host, follower, labels) as server:
        print(f"serving {service.url_of(listener)}/metrics", flush=True)  # noqa: T201
        service.serve(server, follower)
    return 0
