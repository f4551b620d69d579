"""`WorkerContext`: a worker's rank, device, epoch, process group, locks and log.

Guarantees: all its values belong to this incarnation and this epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from phalanx.runtime import Kind, ProgressPage, SharedLock
from phalanx.supervision import SpecError, check_choice, require_package

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.runtime import Link, Rendezvous

    from .layout import Layout


@dataclass(slots=True)
class WorkerContext:
    """Identity and environment of a worker.

    Attributes:
        group: The name of its rank group.
        local_rank: Its rank among the ranks of this machine.
        coordinates: Its place in every parallel dimension that has more than one; empty if the
            executor was built without a layout.
        devices: The devices leased to it, as torch names them in this process.
        epoch: How often its group has been formed.
        incarnation: How often this rank has been started, 1 for the first.
        rendezvous: The rendezvous of this epoch's ranks; None if there is none.
        log: A structlog logger; group, rank, incarnation and pid are on every line. Records of
            level debug are not sent.
    """

    group: str
    rank: int
    local_rank: int
    world_size: int
    layout: Layout
    coordinates: Mapping[str, int]
    devices: tuple[str, ...]
    epoch: int
    incarnation: int
    rendezvous: Rendezvous | None
    log: Any
    _lock_file: int = field(repr=False)
    _link: Link | None = field(default=None, repr=False)
    _listener: Any = field(default=None, repr=False)
    _page: ProgressPage | None = field(default=None, repr=False)
    _machines: int = field(default=1, repr=False)
    _has_joined: bool = field(default=False, repr=False)

    @property
    def device(self) -> str:
        """The device leased to it, or the first of several: ``"cpu"``, ``"cuda:0"``."""
        return self.devices[0]

    @property
    def is_driver(self) -> bool:
        """Whether this rank feeds its tensor group."""
        return self.layout.is_driver(self.rank)

    @property
    def is_output(self) -> bool:
        """Whether this rank's output leads."""
        return self.rank == self.layout.output_rank

    def emit(self, event: object) -> None:
        """Send *event*, any picklable value, to the callbacks of `Executor.subscribe`."""
        if self._link is not None:
            self._link.tell(Kind.EVENT, event)
        elif self._listener is not None:
            self._listener(self.rank, event)

    def report_progress(self) -> None:
        """Have the limit of the call that runs (`hang_after`) begin anew; from any thread."""
        page = self._progress_page()
        if page is not None and page.begun_at:  # else a stream waits for its consumer
            page.go_on()

    @property
    def is_stopping(self) -> bool:
        """Whether this worker begins no further call, since it, or the group it is in, is ended."""
        page = self._progress_page()
        return page is not None and page.is_shut

    def _progress_page(self) -> ProgressPage | None:
        if self._page is None and self._link is not None:
            self._page = ProgressPage(self._link.fds["page"])
        return self._page

    def lock(
        self,
        name: str,
        timeout: float | None = None,
        *,
        scope: Literal["group", "node"] = "group",
    ) -> SharedLock:
        """Return the lock *name*, which the workers of this group share.

        ``with ctx.lock("cache", timeout=5.0) as died:`` enters once the lock is free; *died*
        is None, or the `LockHolder` that was killed inside. It is not reentrant.

        Args:
            name: Any text; equal names denote the same lock.
            timeout: Seconds that ``with`` waits before it raises `LockTimeout`; None waits without
                limit.
            scope: ``"node"``: the workers of this machine alone share it. A group on several
                machines has no other locks.

        Raises:
            SpecError: the group is on several machines, and *scope* was not given.
        """
        check_choice("scope", scope, ("group", "node"))
        if scope == "group" and self._machines > 1:
            remedy = f"the group is on {self._machines} machines: give scope='node'"
            raise SpecError("scope", scope, remedy)
        return SharedLock(self._lock_file, name, self.rank, self.incarnation, timeout)

    def init_process_group(self, backend: str | None = None, **options: Any) -> None:
        """Join this epoch's `torch.distributed` process group; every rank must.

        Args:
            backend: ``"gloo"``, ``"nccl"``, ...; None takes nccl on a GPU and gloo on a CPU.
            options: Passed on to `torch.distributed.init_process_group`; ``timeout`` may be in
                seconds.

        It is destroyed for you when the worker stops in good order.

        Raises:
            MissingPackage: torch is not installed.
        """
        from phalanx.runtime import init_process_group  # noqa: PLC0415  # drags torch in

        require_package("torch", "torch")

        on_gpu = self.device.startswith("cuda")
        if backend is None:
            backend = "nccl" if on_gpu else "gloo"
        if on_gpu and "nccl" in backend:
            # NCCL takes the current device where no tensor tells it another.
            import_module("torch").cuda.set_device(self.device)
        init_process_group(backend, self.rendezvous, self.rank, self.world_size, **options)
        self._has_joined = True
