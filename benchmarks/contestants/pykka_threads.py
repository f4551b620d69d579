"""Pykka's actors, which are threads of one process: arguments are handed over, not copied."""

from __future__ import annotations

from collections import deque
from importlib.metadata import version
from typing import Any

import pykka

from . import protocol


class Echo(protocol.Echo, pykka.ThreadingActor):
    """The same worker, as an actor of Pykka."""

    def on_receive(self, message: Any) -> Any:
        method, args = message
        return getattr(self, method)(*args)


class PykkaThreads(protocol.Contestant):
    """One thread for each rank."""

    def open(self, ranks: int, variant: str) -> None:
        del variant
        self._refs = [Echo.start() for _ in range(ranks)]

    def close(self) -> None:
        for ref in self._refs:
            ref.stop()

    def version(self) -> str:
        return version("pykka")

    def call(self, method: str, *args: Any) -> Any:
        futures = [ref.ask((method, args), block=False) for ref in self._refs]
        return pykka.get_all(futures)

    def pipeline(self, times: int, window: int) -> None:
        waiting: deque[Any] = deque()
        for _ in range(times):
            if len(waiting) == window:
                pykka.get_all(waiting.popleft())
            waiting.append([ref.ask(("nothing", ()), block=False) for ref in self._refs])
        for futures in waiting:
            pykka.get_all(futures)


def make() -> PykkaThreads:
    """Return the contestant."""
    return PykkaThreads()
