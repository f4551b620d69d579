"""Ray: one actor per worker, on a cluster of one machine that ends with this process."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from importlib import import_module
from typing import Any

from . import protocol

ray: Any = import_module("ray")  # has no types in the environment in which this is checked
_STARTED = 120.0  # seconds
# What a variant of a run with deaths asks of each actor.
_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "no restart": {},
    "restart": {"max_restarts": -1},
    "restart, retry": {"max_restarts": -1, "max_task_retries": -1},
}


class RayActors(protocol.Contestant):
    """Actors without resources of their own, called through their handles."""

    def open(self, ranks: int, variant: str) -> None:
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
            _temp_dir=tempfile.gettempdir(),
            _node_ip_address="127.0.0.1",
        )
        actor = ray.remote(num_cpus=0, **_VARIANTS[variant])(protocol.Echo)
        self._actors: list[Any] = [actor.remote() for _ in range(ranks)]
        ray.get([each.nothing.remote() for each in self._actors], timeout=_STARTED)

    def close(self) -> None:
        ray.shutdown()

    def version(self) -> str:
        return str(ray.__version__)

    def pids(self) -> list[int]:
        pids: list[int] = ray.get([each.pid.remote() for each in self._actors], timeout=30)
        return pids

    def call(self, method: str, *args: Any) -> Any:
        # A large argument is put into the object store once for all, as Ray's guide advises.
        if args and _size(args[0]) > 100_000:
            args = (ray.put(args[0]),)
        return ray.get([getattr(each, method).remote(*args) for each in self._actors])

    def pipeline(self, times: int, window: int) -> None:
        waiting: deque[Any] = deque()
        for _ in range(times):
            if len(waiting) == window:
                ray.get(waiting.popleft())
            waiting.append([each.nothing.remote() for each in self._actors])
        for refs in waiting:
            ray.get(refs)

    def works(self, timeout: float) -> None:
        refs = [each.nothing.remote() for each in self._actors]
        ray.get(refs, timeout=timeout)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0)


def make() -> RayActors:
    """Return the contestant."""
    return RayActors()
