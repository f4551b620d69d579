"""Monarch (``torchmonarch``): a mesh of processes with one actor each, on this machine."""

from __future__ import annotations

import sys
from collections import deque
from importlib import import_module
from importlib.metadata import version
from typing import Any

from . import protocol

monarch: Any = import_module("monarch.actor")  # where this is checked it has no types


class Echo(monarch.Actor):  # type: ignore[misc]  # its package is elsewhere
    """The same worker, as an actor of Monarch."""

    def __init__(self) -> None:
        self._echo = protocol.Echo()

    @monarch.endpoint  # type: ignore[untyped-decorator]  # as above
    def do(self, method: str, args: tuple[Any, ...]) -> Any:
        """Do what *method* of the worker does."""
        return getattr(self._echo, method)(*args)


def _let_be(failure: Any) -> None:
    """Leave a fault to the caller, in place of ending the whole program."""
    print(failure.report(), file=sys.stderr)


class MonarchMesh(protocol.Contestant):
    """Calls to the whole mesh."""

    def open(self, ranks: int, variant: str) -> None:
        if variant == "hook":
            monarch.unhandled_fault_hook = _let_be
        processes = monarch.this_host().spawn_procs(per_host={"gpus": ranks})
        self._mesh: Any = processes.spawn("echo", Echo)
        self._pids = list(self.call("pid"))

    def close(self) -> None:
        monarch.shutdown_context().get()

    def version(self) -> str:
        return version("torchmonarch")

    def pids(self) -> list[int]:
        return self._pids

    def call(self, method: str, *args: Any) -> Any:
        return [value for _, value in self._mesh.do.call(method, args).get()]

    def pipeline(self, times: int, window: int) -> None:
        waiting: deque[Any] = deque()
        for _ in range(times):
            if len(waiting) == window:
                waiting.popleft().get()
            waiting.append(self._mesh.do.call("nothing", ()))
        for future in waiting:
            future.get()

    def works(self, timeout: float) -> None:
        self._mesh.do.call("nothing", ()).get(timeout=timeout)


def make() -> MonarchMesh:
    """Return the contestant."""
    return MonarchMesh()
