"""HTTP routes of the page: ``/``, ``/events`` (server-sent events) and ``/state.json``.

A page of another site cannot read it: a request must name this server by an address, by
``localhost`` or by the name it was given (else a name of that site could be pointed here).
"""

from __future__ import annotations

import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any, cast

from phalanx.integrations.follower.service import is_own_name

if TYPE_CHECKING:
    import socket

    from .live_view import LiveView

_MOST = 32  # browsers that listen; each has a thread
_ALIVE = 15.0  # seconds until a browser that has left is noticed
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)
_JSON = "application/json"


class PageServer(ThreadingHTTPServer):
    """Serves *view* on *listener*, which it takes over; *host* is what the user has named."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, host: str, view: LiveView) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.view = view
        self.host = host
        self.places = threading.BoundedSemaphore(_MOST)
        self.page = (files("phalanx.integrations.web") / "page.html").read_text()


class _Handler(BaseHTTPRequestHandler):
    timeout = 2 * _ALIVE

    @property
    def _served(self) -> PageServer:
        return cast("PageServer", self.server)

    def do_GET(self) -> None:  # the base's name
        if not is_own_name(self.headers.get("Host", ""), self._served.host):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "ask by address or localhost\n")
            return
        match self.path.partition("?")[0]:
            case "/":
                _, state = self._served.view.next(0, 0.0)
                inside = state.replace("<", "\\u003c")  # no end of a script
                page = self._served.page.replace("{}", inside, 1)
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page)
            case "/state.json":
                self._answer(HTTPStatus.OK, _JSON, self._served.view.next(0, 0.0)[1])
            case "/events" if self.command == "HEAD":
                self._answer(HTTPStatus.OK, "text/event-stream", "")
            case "/events":
                self._stream()
            case _:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "/, /events and /state.json\n")

    do_HEAD = do_GET  # noqa: N815  # the base's name; the answer has no body

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's name
        """Log nothing."""

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self._head(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _head(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")

    def _stream(self) -> None:
        if not self._served.places.acquire(blocking=False):
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{_MOST} listen already\n")
            return
        try:
            self.send_response(HTTPStatus.OK)
            self._head("text/event-stream")
            self.end_headers()
            version = 0
            while True:
                known, (version, state) = version, self._served.view.next(version, _ALIVE)
                news = f"data: {state}\n\n" if version > known else ": still here\n\n"
                self.wfile.write(news.encode())
        except OSError:  # it has left
            pass
        finally:
            self._served.places.release()
