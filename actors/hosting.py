"""What runs the user's object inside a worker process.

Guarantees: the object is built and started once per incarnation; a process group it joined is
left when it stops; its hooks' own exceptions are reported and do not hide the reason of the stop.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.runtime import WorkerLabels, worker_logger
from phalanx.supervision import UnknownMethod

from .context import WorkerContext

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.runtime import Link, Rendezvous
    from phalanx.supervision import ExitReason

    from .layout import Layout
    from .worker import WorkerActor


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """What one incarnation grows from; pickled by name.

    Attributes:
        factory: The pickled (class, args, kwargs), by value where they have no importable name.
        keywords: The pickled keyword arguments of this rank alone.
    """

    factory: bytes
    keywords: bytes
    labels: WorkerLabels
    rank: int
    local_rank: int
    world_size: int
    layout: Layout
    coordinates: Mapping[str, int]
    device: str
    rendezvous: Rendezvous | None


class WorkerHost:
    """Builds, starts, calls and stops one `WorkerActor`."""

    def __init__(self, seed: Seed, context: WorkerContext) -> None:
        self._seed = seed
        self._context = context
        self._actor: WorkerActor | None = None

    def start(self) -> None:
        """Build the user's object and run `on_start`."""
        cls, args, kwargs = pickle.loads(self._seed.factory)
        own = pickle.loads(self._seed.keywords)
        actor: WorkerActor = cls(*args, **{**kwargs, **own})
        actor.ctx = self._context
        self._actor = actor
        try:
            actor.on_start(self._context)
        except Exception as error:
            self.fail(error)
            raise

    def invoke(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call: a method by name, or a callable that gets the actor first."""
        if not isinstance(method, str):
            return method(self._actor, *args, **kwargs)
        function = getattr(self._actor, method, None)
        if function is None:
            msg = f"{type(self._actor).__qualname__} has no method {method!r}"
            raise UnknownMethod(msg)
        return function(*args, **kwargs)

    def adopt(self, epoch: int) -> None:
        """Note that the group around this worker has a new epoch."""
        self._context.epoch = epoch

    def stop(self, reason: ExitReason) -> None:
        """Run `on_stop`, then leave the process group."""
        try:
            if self._actor is not None:
                self._actor.on_stop(reason)
        except Exception:  # reported; the worker stops all the same
            self._context.log.exception("phalanx.on_stop_failed")
        _leave_process_group()

    def fail(self, error: BaseException) -> None:
        """Run `on_failure`."""
        try:
            if self._actor is not None:
                self._actor.on_failure(error)
        except Exception:  # reported; *error* is what counts
            self._context.log.exception("phalanx.on_failure_failed")


def host_worker(blob: bytes, link: Link) -> WorkerHost:
    """Return the host for the `Seed` in *blob*."""
    seed: Seed = pickle.loads(blob)
    context = WorkerContext(
        group=seed.labels.group,
        rank=seed.rank,
        local_rank=seed.local_rank,
        world_size=seed.world_size,
        layout=seed.layout,
        coordinates=seed.coordinates,
        device=seed.device,
        epoch=link.epoch,
        incarnation=link.incarnation,
        rendezvous=seed.rendezvous,
        log=worker_logger(link.fds["log"], seed.labels),
        _link=link,
    )
    return WorkerHost(seed, context)


def _leave_process_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):  # a broken group cannot be left in good order
            dist.destroy_process_group()
