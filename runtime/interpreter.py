"""Starting processes as new interpreters.

Guarantees: each is a child of this process; it has the descriptors it was given and no others, and
begins when its request is let go.

Left to others: waiting for them.
"""

from __future__ import annotations

import subprocess
import threading
import time
from typing import TYPE_CHECKING

from phalanx.supervision import RuntimeFault

from . import executable
from .marks import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .hub import Hub
    from .start_request import StartRequest


def start_interpreters(hub: Hub, requests: Iterable[StartRequest], deadline: float) -> None:
    """Start all of *requests*, one after the other.

    Raises:
        RuntimeFault: the machine would not start one, or not by *deadline* (monotonic).
    """
    for request in requests:
        # From the hub's thread, because the parent-death signal follows the thread that
        # started a process, not its process: the caller's thread may end any time.
        start = _Start(request)
        hub.post(start)
        # Not until the deadline only: the hub's thread is using the request's descriptors.
        start.done.wait()
        if start.error is not None:
            raise start.error
        if time.monotonic() > deadline:
            msg = f"could not start {request.spec.label!r} before the deadline"
            raise RuntimeFault(msg)


class _Start:
    """One start, for another thread to do."""

    def __init__(self, request: StartRequest) -> None:
        self._request = request
        self.done = threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> None:
        request = self._request
        try:
            request.pid, request.pidfd = _start(request)
            request.state = "parted"
        except Exception as error:  # noqa: BLE001  # raised in the caller's thread
            self.error = error
        finally:
            self.done.set()


def _start(request: StartRequest) -> tuple[int, int]:
    """Return pid and pidfd of a new interpreter that becomes what the request's birth says."""
    spec, mark = request.spec, request.mark
    birth = spec.birth(mark)
    fds = [request.file, request.awaits, *spec.fds.values()]
    return executable.start(
        repr(spec.label),
        executable.command("exec_main", [",".join(map(str, fds))], birth.sys_path),
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=spec.stdout,
        stderr=spec.stderr,
        env={**birth.env, VARIABLE: mark.value},
        cwd=birth.cwd,
        start_new_session=spec.new_session,
    )
