"""This project, through its public face: `collective_rpc` of an executor with default settings."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from phalanx import Executor, Intensity, Launch, Strategy, WorkerActor
from phalanx.runtime import Zmq

from . import protocol

_PATIENT = 600.0  # seconds: between its turns all of a contestant is stopped

# What a variant passes on.
_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "tcp": {"launch": Launch(transport=Zmq(lost_after=_PATIENT))},
    "ipc": {"launch": Launch(transport=Zmq(ipc=True, lost_after=_PATIENT))},
    "fail": {"strategy": Strategy.ONE_FOR_ONE, "intensity": Intensity(10, 60.0)},
    "retry": {"strategy": Strategy.ONE_FOR_ONE, "intensity": Intensity(10, 60.0)},
    "retry, a spare": {
        "strategy": Strategy.ONE_FOR_ONE,
        "intensity": Intensity(10, 60.0),
        "standby": 1,
    },
}


class Echo(protocol.Echo, WorkerActor):
    """The same worker, as an actor of ours."""


class PhalanxGroup(protocol.Contestant):
    """A rank group."""

    _executor: Executor[Echo]

    def open(self, ranks: int, variant: str) -> None:
        self._retries = 10 if variant.startswith("retry") else 0
        self._executor = Executor(Echo, ranks, devices="cpu", **_VARIANTS[variant])

    def close(self) -> None:
        self._executor.close()

    def version(self) -> str:
        try:
            return version("phalanx")
        except PackageNotFoundError:  # a tree that is on the path
            return "not installed"

    def pids(self) -> list[int]:
        return [info.pid or 0 for info in self._executor.ranks]

    def tensor(self, size: int) -> Any:
        torch = import_module("torch")  # by name: its types are partly unknown
        return torch.ones(size // 8, dtype=torch.int64)

    def call(self, method: str, *args: Any) -> Any:
        return self._executor.collective_rpc(method, args=args)

    def pipeline(self, times: int, window: int) -> None:
        call = self._executor.collective_rpc
        waiting: deque[Any] = deque()
        for _ in range(times):
            if len(waiting) == window:
                waiting.popleft().result()
            waiting.append(call("nothing", non_block=True))
        for future in waiting:
            future.result()

    def slow(self, seconds: float, notes: str) -> list[str]:
        answers = self._executor.collective_rpc(
            "slow", args=(seconds, notes), retries=self._retries
        )
        return [str(answer) for answer in answers]

    def works(self, timeout: float) -> None:
        self._executor.collective_rpc("nothing", timeout, retries=self._retries)


def make() -> PhalanxGroup:
    """Return the contestant."""
    return PhalanxGroup()
