"""`Runtime`: the event loop, launcher, output collector and devices that executors share.

- Each part starts when it is first needed and ends when the last user has released it.
- A forked child of the driver never uses its parent's.

A program that wants its zygote warm between executors holds one open:
``with Runtime() as runtime: Executor(..., runtime=runtime)``.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from phalanx.runtime.devices.pool import DevicePool
from phalanx.runtime.linux import descriptors
from phalanx.runtime.observe.report_folder import ReportFolder
from phalanx.runtime.observe.status import StatusSource
from phalanx.runtime.output.collector_client import OutputCollector, choose_console
from phalanx.runtime.process.launcher import Launcher, close_all
from phalanx.runtime.threads.event_loop import EventLoop
from phalanx.supervision import RuntimeFault, check_kind

if TYPE_CHECKING:
    from .event import LoggedEvent

_IMPORT = 300.0  # seconds for the preload; a cold disk under load takes its time for torch
_CLOSE = 10.0
_LEAST_FILE = 1 << 20  # bytes: the tails of one worker take a quarter


class Runtime:
    """The shared parts. Use it as a context manager, or close it.

    Args:
        console: How workers' output and events are shown on the driver's stdout and stderr:
            ``"text"``, ``"json"`` or None. ``"logging"`` hands them to the standard library's
            `logging` in the driver instead: loggers ``phalanx``, ``phalanx.worker``,
            ``phalanx.worker.stdout`` and ``phalanx.worker.stderr``. ``"auto"`` is the one that
            ``PHALANX_CONSOLE`` names (``none`` for None), and text without it.
        level: The least level of records that are shown: ``"debug"``, ``"info"``, ``"warning"``,
            ``"error"`` or ``"critical"``; None is the one that ``PHALANX_LOG_LEVEL`` names, and
            warning without it.
        stream: Whether observers may attach from outside.
        name: The driver's name for observers.
        report_dir: Where its executors also write crash reports as files, unless they have a
            folder of their own; None for that which ``PHALANX_REPORT_DIR`` names, if any.

    Attributes:
        owner: The process it belongs to.
        reports: The folder of crash reports, or None.
    """

    def __init__(
        self,
        *,
        console: Literal["auto", "text", "json", "logging"] | None = "auto",
        level: str | None = None,
        stream: bool = True,
        name: str = "",
        report_dir: str | Path | ReportFolder | None = None,
    ) -> None:
        check_machine()
        check_kind("name", name, str)
        console, level = choose_console(console, level)
        self.reports = None if report_dir is None else ReportFolder.of("report_dir", report_dir)
        self.owner = os.getpid()
        _open_standard_descriptors()
        self._new_collector = partial(
            OutputCollector, console=console, level=level, stream=stream, name=name
        )
        self._lock = threading.Lock()
        self._pools: dict[tuple[object, ...], DevicePool] = {}
        self._collector: OutputCollector | None = None
        self._closed = False
        self.loop = EventLoop(emit=self._emit)
        with descriptors.closed_on_error(self.loop):
            self._launcher = Launcher(self.loop, preload=(), start_timeout=_IMPORT, emit=self._emit)
        self.status_source = StatusSource(self._emit)

    @property
    def launcher(self) -> Launcher:
        """The launcher of processes."""
        self._check()
        return self._launcher

    @property
    def collector(self) -> OutputCollector:
        """The process that reads what workers write."""
        with self._lock:
            self._check()
            if self._collector is None:
                self._collector = self._new_collector(
                    self._launcher, on_status_request=self.status_source.request
                )
            return self._collector

    def devices(self, wanted: Any, world_size: int, devices_per_rank: float = 1) -> DevicePool:
        """Return the pool that *wanted* means, with a hold on it; see `DevicePool.of`.

        Executors that ask for the same devices share a pool, so that none is leased twice, and a
        group that follows another waits for the memory that it left.
        """
        of = partial(DevicePool.of, world_size=world_size, devices_per_rank=devices_per_rank)
        if wanted == "cpu" or isinstance(wanted, DevicePool):
            return of(wanted)
        named = isinstance(wanted, list | tuple)
        names = tuple(map(str, cast("list[object]", wanted))) if named else ("auto",)
        key = (*names, os.environ.get("CUDA_VISIBLE_DEVICES"))
        with self._lock:
            self._check()
            pool = self._pools.get(key)
            if pool is None or (wanted == "cuda" and not pool.has_gpus):
                pool = self._pools[key] = of(wanted)
            return of(pool)

    def close(self, deadline: float | None = None) -> None:
        """End everything; by force at *deadline* (monotonic).

        Called again it ends what is left.

        Raises:
            RuntimeFault: something was still there at *deadline*; all the rest has been ended.
        """
        with self._lock:
            if self.owner != os.getpid():
                return
            self._closed = True
            collector = self._collector
            pools, self._pools = list(self._pools.values()), {}
        until = time.monotonic() + _CLOSE if deadline is None else deadline
        close_all(
            [
                *([] if collector is None else [partial(collector.close, until)]),
                partial(self._launcher.close, until),
                *(pool.close for pool in pools),
                self.loop.close,
            ]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self.owner != os.getpid():
            raise RuntimeFault(
                "this runtime belongs to the parent process; build executors after the fork"
            )
        if self._closed:
            raise RuntimeFault("the runtime is closed")

    def _emit(self, event: LoggedEvent) -> None:
        collector = self._collector
        if collector is not None:
            collector.emit(event)


def check_machine() -> None:
    """Raise `RuntimeFault` if /proc is not mounted or files, and shared memory, are too small."""
    if not Path("/proc/self/stat").exists():
        raise RuntimeFault("/proc shows no processes: mount it (mount -t proc proc /proc)")
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY and size < _LEAST_FILE:
        raise RuntimeFault(
            f"files may have {size} bytes (ulimit -f), and so may shared memory, of which "
            f"{_LEAST_FILE} are needed: raise the limit"
        )


def _open_standard_descriptors() -> None:
    """Have 0, 1 and 2 open, as a daemon may not: ours would get those numbers, and children."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(fd, True)  # the call's own signature
    os.close(fd)


_shared: Runtime | None = None
_users = 0
_guard = threading.Lock()


def _renew_guard() -> None:
    global _guard  # noqa: PLW0603  # another thread, which the fork did not copy, may have had it
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_renew_guard)


def acquire_shared() -> Runtime:
    """Return this process's shared runtime; each call is matched by one `release_shared`."""
    global _shared, _users  # noqa: PLW0603  # one zygote per process is the point of sharing
    with _guard:
        if _shared is None or _shared.owner != os.getpid():
            _shared = Runtime()
            _users = 0
        _users += 1
        return _shared


def release_shared(runtime: Runtime) -> None:
    """Release the result of `acquire_shared`; the last release closes it."""
    global _shared, _users  # noqa: PLW0603  # as above
    with _guard:
        if runtime is not _shared:
            return
        _users -= 1
        if _users:
            return
        _shared = None
    runtime.close()
