"""HTTP routes: ``/metrics``, ``/healthz`` (the driver answers), ``/readyz`` (its groups are whole).

On loopback a request must name this server as `is_own_name` says; beyond it any name will do.

The listening socket is made apart from the server, so that a wrong address is its maker's error.
"""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler

import prometheus_client
from prometheus_client.exposition import ThreadingWSGIServer

from phalanx.integrations.follower.follower import Follower
from phalanx.integrations.follower.service import is_own_name, serve

from .driver_metrics import DriverMetrics
from .metric_definitions import DriverCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


_TEXT = ("Content-Type", "text/plain; charset=utf-8")


class _Handler(WSGIRequestHandler):
    """Logs no request, and gives up a client that sends none."""

    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's name
        """Log nothing: there is a probe every few seconds."""


def make_server(
    listener: socket.socket, host: str, follower: Follower[DriverMetrics], labels: Mapping[str, str]
) -> ThreadingWSGIServer:
    """Return a server on *listener*, which it takes over; *host* is what the user has named."""
    server = ThreadingWSGIServer(("", 0), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_address = listener.getsockname()
    server.server_name, server.server_port = listener.getsockname()[:2]
    server.setup_environ()
    is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    server.set_app(application(follower, labels, host if is_local else ""))
    return server


def application(
    follower: Follower[DriverMetrics], labels: Mapping[str, str], host: str
) -> Callable[..., Iterable[bytes]]:
    """Return the WSGI application of what *follower* knows, for any name if *host* is empty."""
    registry = prometheus_client.CollectorRegistry()
    collector: Any = DriverCollector(follower.consumer, follower.lock, labels)
    registry.register(collector)
    library: Any = prometheus_client  # which types the application in part
    metrics: Callable[..., Iterable[bytes]] = library.make_wsgi_app(registry)
    consumer = follower.consumer
    checks = {"/healthz": consumer.unwell, "/readyz": consumer.unready}

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if host and not is_own_name(environ.get("HTTP_HOST", host), host):
            start("403 Forbidden", [_TEXT])
            return [b"ask by address or localhost\n"]
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start)
        if path not in checks:
            start("404 Not Found", [_TEXT])
            return [b"/metrics, /healthz and /readyz are here\n"]
        with follower.lock:
            problem = checks[path](time.monotonic())
        start("503 Service Unavailable" if problem else "200 OK", [_TEXT])
        return [f"{problem or 'ok'}\n".encode()]

    return answer


def main() -> None:
    """Serve the driver and the socket that the command line names, for a `MetricsServer`."""
    pid, fd, host, labels = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to act on
    if os.getppid() == pid:  # else it has ended, and its number may be another's
        follower = Follower(DriverMetrics(), pid=pid)
        with make_server(socket.socket(fileno=fd), host, follower, labels) as server:
            serve(server, follower)
