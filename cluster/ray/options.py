"""`Ray`: options of a Ray cluster, checked when they are built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.cluster.driver.brokered_engine import BrokeredEngine
from phalanx.cluster.driver.options import ClusterOptions
from phalanx.supervision import (
    MissingPackage,
    RuntimeFault,
    SpecError,
    check_number,
    installed_version,
)

if TYPE_CHECKING:
    from phalanx.runtime import EventLoop

OLDEST = (2, 52)
"""The first release of Ray with authentication by token."""

_LARGEST = 64 * 1024  # bytes of a runtime environment; long values belong into files


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray(ClusterOptions):
    """Machines of a Ray cluster, which is running; the driver is on one of its machines.

    Each node is an actor in a bundle of a placement group. Ray is reached by a process beside the
    driver, which takes a token from where ``ray.init`` does. The driver does not import Ray.

    Attributes:
        address: As ``ray.init`` takes it, but no ``ray://``; ``"auto"`` also takes ``RAY_ADDRESS``.
        resources: Resources that a node reserves in Ray, beyond the GPUs of its ranks and one CPU.
            ``{"CPU": 16}`` also lets torch use 16 threads: Ray sets ``OMP_NUM_THREADS`` by it.
        runtime_env: As Ray takes it, in plain values: the code and the variables of the nodes.
    """

    address: str = "auto"
    resources: Mapping[str, float] | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        ClusterOptions.__post_init__(self)
        address: Any = self.address
        if not isinstance(address, str) or not address.strip() or address == "local":
            raise SpecError("cluster.address", address, "give 'auto' or HOST:PORT of Ray's head")
        if "://" in address:
            remedy = (
                "run the driver on a machine of the cluster, as by `ray job submit`, and give "
                "'auto' or HOST:PORT of Ray's head"
            )
            raise SpecError("cluster.address", address, remedy)
        for name, amount in _mapping("cluster.resources", self.resources).items():
            check_number(f"cluster.resources[{name!r}]", amount)
        environment = _mapping("cluster.runtime_env", self.runtime_env)
        try:
            size = len(json.dumps(environment, allow_nan=False))
        except (TypeError, ValueError) as error:
            remedy = f"give plain values, of which JSON can be made: {error}"
            raise SpecError("cluster.runtime_env", self.runtime_env, remedy) from None
        if size > _LARGEST:
            remedy = f"give at most {_LARGEST} bytes; put long values into working_dir"
            raise SpecError("cluster.runtime_env", f"{size} bytes", remedy)

    def engine(self, loop: EventLoop, *, gpus_per_rank: float) -> BrokeredEngine:
        """See `ClusterOptions`.

        Raises:
            MissingPackage: Ray is not installed.
            RuntimeFault: it is too old.
        """
        check_ray_installed()
        opening = {
            "address": self.address,
            "resources": dict(self.resources or {}),
            "runtime_env": dict(self.runtime_env or {}),
            "ranks_per_node": self.ranks_per_node,
            "spare_nodes": self.spare_nodes,
            "gpus_per_rank": gpus_per_rank,
        }
        return BrokeredEngine(loop, "Ray broker", "phalanx.cluster.ray.broker_main", opening)


def check_ray_installed() -> None:
    """Raise as `Ray.engine` does."""
    there = installed_version("ray")
    if not there:
        raise MissingPackage("ray", "ray")
    if tuple(int(part) for part in there.split(".")[:2]) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise RuntimeFault(f"Ray {there} is too old: pip install 'ray>={needed}'")


def _mapping(field: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise SpecError(field, value, "give a mapping from names")
    return dict(value)
