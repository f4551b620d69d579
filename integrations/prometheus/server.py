"""`MetricsServer`: the metrics of this program, served by a process beside it.

- A scrape uses no thread or lock of the driver. The process follows the stream
  of the driver (`Runtime(stream=True)`, the default), and ends with the driver, however that ends.
- If it ends before, another is started on the same socket: at first at most one in a second, and
  one in a minute where they keep ending.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from phalanx.integrations.follower.service import listen, url_of
from phalanx.runtime import descriptors
from phalanx.supervision import RuntimeFault, require_package

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PORT = 9464
_CALM = 1.0  # seconds from one start to the next; twice as many after each that ended early
_MOST = 60.0  # of those; one that has served for so long has not ended early
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from phalanx.integrations.prometheus.http_server import main; main()"
)


def check_installed() -> None:
    """Raise `MissingPackage` if prometheus_client is missing."""
    require_package("prometheus_client", "prometheus")


class MetricsServer:
    """Serves ``/metrics``, ``/healthz`` and ``/readyz`` until it is closed; a context manager.

    Args:
        port: The TCP port; 0 takes a free one.
        host: The address of the interface; only loopback unless another is named, such as
            ``0.0.0.0`` for all.
        labels: Further labels of every metric, by name.

    Attributes:
        port: The port.
        url: The address of the server, without a path.

    Raises:
        SpecError: the address, the port or a label is invalid.
        MissingPackage: prometheus_client is not installed.
        RuntimeFault: the port is in use, or no process can be started.
    """

    def __init__(
        self,
        port: int = DEFAULT_PORT,
        host: str = "127.0.0.1",
        *,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        check_installed()
        from .metric_definitions import check_labels  # noqa: PLC0415  # needs prometheus_client

        self._labels = dict(labels or {})
        check_labels(self._labels)
        self._owner, self._host = os.getpid(), host
        self._listener = descriptors.own(listen(host, port))
        self.port: int = self._listener.getsockname()[1]
        self.url = url_of(self._listener)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # no start while it is being closed
        try:
            self._process = self._start()
        except BaseException as error:
            descriptors.close(self._listener)
            if isinstance(error, OSError):
                raise RuntimeFault(f"the metrics server could not be started: {error}") from error
            raise
        self._keeper = threading.Thread(target=self._keep, name="phalanx-metrics", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        if os.getpid() != self._owner:  # a forked child
            return
        with self._lock:
            self._closed.set()
            self._process.kill()  # it has no state
        self._keeper.join()
        descriptors.close(self._listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        fd = self._listener.fileno()
        about = json.dumps([os.getpid(), fd, self._host, self._labels])
        path = json.dumps(sys.path, default=str)  # a program may have put a Path there
        # -P: nothing is imported from the working folder before it has that path.
        command = [sys.executable, "-P", "-c", _BOOT, path, about]
        return subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)

    def _keep(self) -> None:
        calm = _CALM
        while True:
            since = time.monotonic()
            self._process.wait()
            served = time.monotonic() - since
            if self._closed.wait(max(0.0, calm - served)):
                return
            calm = _CALM if served >= _MOST else min(2 * calm, _MOST)
            with self._lock:
                if self._closed.is_set():
                    return
                try:
                    self._process = self._start()
                except OSError:
                    continue  # `wait` returns at once, and it is tried again later
