"""Client of the guardian, the process that kills what is left when the driver dies.

- A guardian runs from the first process of a tree to the last; one that exits is replaced, and its
  successor knows all sessions.
- `close` returns when it is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

from phalanx.runtime.event import unheard

from . import interpreter
from .helper import Helper

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.linux.process_tree import TreeTag
    from phalanx.runtime.threads.event_loop import EventLoop

    from .process import Process


class Guardian:
    """The one guardian of a driver."""

    def __init__(
        self, loop: EventLoop, tag: TreeTag, emit: Callable[[LoggedEvent], None] = unheard
    ) -> None:
        self._loop = loop
        self._tag = tag
        self._sessions: set[tuple[int, int]] = set()
        self._helper = Helper(loop, "guardian", self._spawn, replay=self._replay, emit=emit)

    @property
    def pid(self) -> int | None:
        """The process; None while there is none."""
        return self._helper.pid

    def start(self) -> None:
        """Start it unless it runs."""
        self._helper.start()

    def add_session(self, key: tuple[int, int]) -> None:
        """Have the session of that leader killed with the driver."""
        self._sessions.add(key)
        self._helper.send(json.dumps({"add_session": key}).encode())

    def drop_session(self, key: tuple[int, int]) -> None:
        """Forget the session of that leader."""
        self._sessions.discard(key)
        self._helper.send(json.dumps({"drop_session": key}).encode())

    def close(self, deadline: float) -> None:
        """Kill it; raises RuntimeFault if it is still there at *deadline* (monotonic)."""
        self._helper.close(deadline)

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        with os.fdopen(os.pidfd_open(os.getpid()), "rb") as driver:
            fds = (control.fileno(), driver.fileno())
            arguments = [*map(str, fds), self._tag.pattern.decode()]
            return interpreter.start_process(
                self._loop,
                "guardian",
                interpreter.bare_command("guardian_main", arguments),
                on_exit,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", ""), "PHALANX_TREE": self._tag.outer},
                cwd="/",
                start_new_session=True,
            )

    def _replay(self) -> Iterator[tuple[bytes, list[int]]]:
        # In a file: a socket holds a few hundred messages, and a message is bounded.
        with os.fdopen(os.memfd_create("phalanx-sessions"), "w+") as file:
            json.dump([*self._sessions], file)
            file.flush()
            yield b"{}", [file.fileno()]
