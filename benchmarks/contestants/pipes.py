"""One `multiprocessing.Pipe` per worker, and its own pickling: what the standard library gives."""

from __future__ import annotations

import multiprocessing
import platform
from typing import TYPE_CHECKING, Any

from .protocol import Contestant, Echo

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def serve(pipe: Connection) -> None:
    """Answer calls until the message to stop."""
    echo = Echo()
    while (message := pipe.recv()) != "stop":
        method, args = message
        pipe.send(getattr(echo, method)(*args))


class Pipes(Contestant):
    """One pipe and one process for each rank."""

    def open(self, ranks: int, variant: str) -> None:
        del variant
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(ranks):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("stop")
        for process in self._processes:
            process.join()

    def version(self) -> str:
        return f"Python {platform.python_version()}"

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, method: str, *args: Any) -> Any:
        for pipe in self._pipes:
            pipe.send((method, args))
        return [pipe.recv() for pipe in self._pipes]

    def pipeline(self, times: int, window: int) -> None:
        sent = answered = 0
        while answered < times:
            while sent < times and sent - answered < window:
                for pipe in self._pipes:
                    pipe.send(("nothing", ()))
                sent += 1
            for pipe in self._pipes:
                pipe.recv()
            answered += 1


def make() -> Pipes:
    """Return the contestant."""
    return Pipes()
