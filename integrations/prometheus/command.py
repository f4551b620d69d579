"""``phalanx metrics``: serve the metrics of a running driver from outside, or print a file."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

from .listener import listen
from .server import DEFAULT_PORT, check_installed

if TYPE_CHECKING:
    import argparse

_FILES = {"alerts": "alerts.yml", "dashboard": "dashboard.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    add = parser.add_argument
    whom = (
        "pid of the driver, with which this ends; or its name, under which those that follow it "
        "are found too; may be left out if only one is running"
    )
    add("driver", nargs="?", default="", help=whom)
    add("--port", type=int, default=DEFAULT_PORT, help=f"TCP port ({DEFAULT_PORT})")
    add("--host", default="127.0.0.1", help="address of the interface (127.0.0.1)")
    add("--label", action="append", default=[], metavar="NAME=VALUE", help="added to every metric")
    add("--print", choices=sorted(_FILES), help="print the alert rules or the dashboard, and end")


def run(arguments: argparse.Namespace) -> int:
    """Serve until the driver that was named by its pid has ended, or the user has enough."""
    if arguments.print:
        folder = files("phalanx.integrations.prometheus")
        sys.stdout.write((folder / _FILES[arguments.print]).read_text())
        return 0
    check_installed()
    from .account import DriverAccount  # noqa: PLC0415  # as below
    from .exporter import serve  # noqa: PLC0415  # needs prometheus_client
    from .families import check_labels  # noqa: PLC0415  # as above
    from .follower import Follower  # noqa: PLC0415  # as above

    labels: dict[str, str] = {}
    for each in arguments.label:
        name, equals, value = each.partition("=")
        if not equals:
            raise SpecError("--label", each, "give NAME=VALUE")
        labels[name] = value
    check_labels(labels)
    driver = arguments.driver
    whom: dict[str, Any] = {"pid": int(driver)} if driver.isdigit() else {"name": driver}
    follower = Follower(DriverAccount(), **whom)
    with listen(arguments.host, arguments.port) as listener:
        host, port = listener.getsockname()[:2]
        print(f"serving http://{host}:{port}/metrics", flush=True)  # noqa: T201
        serve(listener, follower, labels)
    return 0
