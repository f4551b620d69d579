"""Client of the guardian, the process that kills what is left when the driver dies.

- A guardian runs from the first process of a tree to the last; one that exits is replaced, and its
  successor knows all sessions.
- `close` returns when it is gone.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from typing import TYPE_CHECKING

from phalanx.runtime.event import LoggedEvent, unheard
from phalanx.runtime.linux import descriptors
from phalanx.runtime.linux.guardian_main import LEASE

from . import interpreter
from .helper import Helper

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from phalanx.runtime.linux.process_tree import TreeTag
    from phalanx.runtime.threads.event_loop import EventLoop

    from .child_process import Process


class Guardian(Helper):
    """The one guardian of a driver."""

    def __init__(
        self, loop: EventLoop, tag: TreeTag, emit: Callable[[LoggedEvent], None] = unheard
    ) -> None:
        super().__init__(
            loop, "guardian", self._start_process, replay=self._tell_sessions, emit=emit
        )
        self._loop = loop
        self._tag = tag
        self._sessions: set[tuple[int, int]] = set()
        self._lease = -1  # the file that says when everything ends
        self._until = math.inf

    def add_session(self, key: tuple[int, int]) -> None:
        """Have the session of that leader killed with the driver."""
        self._sessions.add(key)
        self.send(json.dumps({"add_session": key}).encode())

    def drop_session(self, key: tuple[int, int]) -> None:
        """Forget the session of that leader."""
        self._sessions.discard(key)
        self.send(json.dumps({"drop_session": key}).encode())

    def keep_until(self, at: float) -> None:
        """Have everything killed at *at*, this process included, unless it is called again.

        In seconds of ``syscalls.boot_time``. To put the time off waits for nothing.
        """
        with self.lock:
            if self.closed:
                return
            if self._lease < 0:
                self._lease = descriptors.own(os.memfd_create("phalanx-lease"))
            os.pwrite(self._lease, LEASE.pack(at), 0)
            is_earlier, self._until = at < self._until, at
            if is_earlier:  # else the guardian looks into the file in time
                self.send(*self._tell_lease())

    def close(self, deadline: float, *, ask: bool = False) -> None:
        """End the process for good; see `Helper.end`."""
        super().close(deadline, ask=ask)
        with self.lock:
            if self._lease >= 0 and not self.is_inherited:
                descriptors.close(self._lease)
                self._lease = -1

    def _start_process(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        return interpreter.start_helper(
            self._loop,
            "guardian",
            interpreter.bare_command("guardian_main"),
            [self._tag.pattern.decode()],
            control=control,
            on_exit=on_exit,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", ""), "PHALANX_TREE": self._tag.outer},
            cwd="/",
        )

    def _tell_sessions(self) -> Iterator[tuple[bytes, list[int]]]:
        # In a file: a socket holds a few hundred messages, and a message is bounded.
        with os.fdopen(os.memfd_create("phalanx-sessions"), "w+") as file:
            json.dump([*self._sessions], file)
            file.flush()
            yield b"{}", [file.fileno()]
        if self._lease >= 0:
            yield self._tell_lease()

    def _tell_lease(self) -> tuple[bytes, list[int]]:
        return b'{"lease": []}', [self._lease]
