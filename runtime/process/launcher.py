"""Starts processes: forked from a zygote in milliseconds, or as new interpreters.

- A started process is a child of this process, dies with it from its first instruction on, and
  begins only when all of its batch exist; a start that fails leaves nothing.
- If forking from a zygote is not safe, new interpreters are started.
- One launcher has any number of zygotes, one guardian and one process tag.
- `close` kills the processes that still run: end them first.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import threading
import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from phalanx.runtime.event import LoggedEvent, discard_event
from phalanx.runtime.linux import descriptors, process_tree
from phalanx.runtime.linux.cgroup import OomCounter
from phalanx.runtime.linux.guardian_main import LEASE, SESSION
from phalanx.runtime.linux.process_tree import TreeTag
from phalanx.supervision import RuntimeFault, WouldDeadlock

from . import interpreter
from .child_process import Process
from .helper import Helper
from .orphan_reaper import Reaper
from .zygote_client import LaunchWait, StartRequest, Zygote, read_at_start

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from phalanx.runtime.threads.event_loop import EventLoop

    from .child_main import LaunchSpec


_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class Launcher:
    """Starts processes. Thread-safe; any number of launches may be under way at once.

    Args:
        preload: The modules that a zygote imports for what names no preload itself.
        start_timeout: Seconds that a zygote may take to import its modules.
        emit: Called with events of the helper processes; may be called on the event loop's thread.
    """

    def __init__(
        self,
        loop: EventLoop,
        *,
        preload: Sequence[str] = ("torch",),
        start_timeout: float = 60.0,
        emit: Callable[[LoggedEvent], None] = discard_event,
    ) -> None:
        self.loop = loop
        self._owner = os.getpid()
        self._tag = TreeTag.new(dict(os.environ))
        self._orphans = Reaper(loop)
        self._guardian = Guardian(loop, self._tag, emit)
        self._oom = OomCounter()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._processes: set[Process] = set()
        self._zygotes: dict[tuple[object, ...], Zygote] = {}
        self._new_zygote = partial(
            Zygote, loop, self._tag, self._orphans, start_timeout=start_timeout, emit=emit
        )
        self._preload = tuple(preload)
        self._has_started = False  # anything
        self._withstood: list[tuple[int, int]] = []  # what the last `close` has killed in vain
        self._closed = False
        self.zygote()

    def zygote(
        self, preload: Sequence[str] | None = None, asked_env: Mapping[str, str] = _NO_VARIABLES
    ) -> Zygote:
        """Return the zygote for a `LaunchSpec` with these; it may have no process yet.

        The driver's own variables make no other zygote: libraries change some as they are imported,
        and a restart is not to wait for new imports.
        """
        modules = self._preload if preload is None else tuple(preload)
        variables = read_at_start(asked_env)
        key = (modules, *sorted(variables.items()))
        with self._lock:
            zygote = self._zygotes.get(key)
            if zygote is None:
                zygote = self._zygotes[key] = self._new_zygote(modules, variables)
            return zygote

    def warm(
        self, preload: Sequence[str] | None = None, asked_env: Mapping[str, str] = _NO_VARIABLES
    ) -> None:
        """Start that zygote now, without waiting for its imports."""
        self._start_guardian()
        self.zygote(preload, asked_env).warm()

    def keep_until(self, at: float) -> None:
        """Have everything killed at *at*, this process included, unless it is called again.

        In seconds of ``syscalls.boot_time``; also if this process is stopped then.
        """
        self._guardian.keep_until(at)
        if not self._has_started:
            self._start_guardian()

    def launch(
        self,
        *specs: LaunchSpec,
        on_exit: Callable[[Process], None],
        deadline: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> list[Process]:
        """Start all of *specs* or, if one fails, none of them; return once they run.

        Args:
            on_exit: Called once with each process when it has ended, on the event loop's thread;
                maybe before this returns.
            is_wanted: Asked while it waits; the launch is given up if it returns False.

        Raises:
            SpecError: a module of the preload does not import, or a spec names what is not there.
            RuntimeFault: the machine would not start one, or not in time, or it was given up.
                Nothing is left of any.
        """
        if not specs:
            return []
        if self.loop.is_current():
            raise WouldDeadlock("launching from the loop's own thread, which launching waits for")
        self._start_guardian()
        out_of_memory = self._oom.watch()
        wait = LaunchWait(specs[0].label, deadline, is_wanted)
        requests: list[StartRequest] = []
        rest: list[StartRequest] = []
        forked: dict[Zygote, list[StartRequest]] = {}
        try:
            for spec in specs:
                number = next(self._numbers)
                requests.append(StartRequest.of(number, spec, self._tag.of(number, spec.label)))
                group = rest
                if spec.method == "zygote":
                    group = forked.setdefault(self.zygote(spec.preload, spec.asked_env), [])
                group.append(requests[-1])
            for zygote in forked:
                zygote.warm()  # all of them, before one is waited for
            for zygote, group in forked.items():
                if not zygote.fork(group, wait):
                    rest += group
            for request in rest:
                # The parent-death signal follows the thread that started a process, not its
                # process: the caller's thread may end any time.
                start = partial(interpreter.start_interpreter, request)
                request.pid, request.pidfd = self.loop.call(start)
                if time.monotonic() > deadline:
                    raise RuntimeFault(f"could not start {request.spec.label!r} in time")
            wait.check()
            return self._let_go(requests, on_exit, out_of_memory)
        except OSError as error:
            raise RuntimeFault(f"could not start {specs[0].label!r}: {error}") from error
        finally:
            for request in requests:
                request.close()
                if request.pidfd >= 0:  # it has no handle: the launch has failed
                    request.discard(self._orphans)

    def close(self, deadline: float) -> None:
        """End everything that was started here, daemons included, and the helpers.

        Called again it ends what is left.

        Raises:
            RuntimeFault: something was still there at *deadline* (monotonic); it names it. All the
                rest has been ended.
        """
        if self._owner != os.getpid():
            return
        with self._lock:
            self._closed = True
            processes = list(self._processes)
            zygotes = list(self._zygotes.values())

        def end_tree() -> None:
            if not self._has_started:
                return
            roots = [process.key for process in processes]
            target = process_tree.TreeTarget(self._tag.pattern, roots, roots, self._withstood)
            left = process_tree.kill(target, deadline)
            self._withstood = [(one.pid, one.ticks) for one in left]
            if left:
                names = ", ".join(f"{one.pid} ({one.command})" for one in left)
                raise RuntimeFault(f"processes withstood being killed: {names}")

        def let_go() -> None:
            late = [process for process in processes if not process.wait(deadline)]
            for process in processes:
                if process not in late:
                    process.close()
            if late:
                names = ", ".join(f"{process.label} (pid {process.pid})" for process in late)
                raise RuntimeFault(f"processes have not ended in time: {names}")

        close_all(
            [
                *(partial(zygote.close, deadline) for zygote in zygotes),
                end_tree,
                let_go,
                lambda: self._orphans.close(deadline),
                lambda: self._guardian.close(deadline),
            ]
        )

    def _let_go(
        self,
        requests: list[StartRequest],
        on_exit: Callable[[Process], None],
        out_of_memory: Callable[[], str],
    ) -> list[Process]:
        """Return the handles of *requests*, all of which begin now."""
        processes: list[Process] = []
        try:
            for request in requests:
                process = Process(
                    self.loop,
                    request.pid,
                    request.pidfd,
                    label=request.spec.label,
                    on_exit=on_exit,
                    tag=request.tag.pattern,
                    out_of_memory=out_of_memory,
                    on_close=self._on_process_closed,
                    collect_later=partial(self._orphans.take, kill=False),
                )
                request.pidfd = -1  # the process's from here on
                processes.append(process)
                with self._lock:
                    self._processes.add(process)
                    closed = self._closed
                self._guardian.add_session(process.key)
                if closed:
                    process.send_signal(signal.SIGKILL)
        except BaseException:
            # Nothing has run in them yet. They are dealt with as those that have no handle.
            for request, process in zip(requests, processes, strict=False):
                if (pidfd := process.give_up()) >= 0:
                    request.pidfd = descriptors.own(pidfd)
            raise
        for request in requests:
            request.release()
        return processes

    def _start_guardian(self) -> None:
        if self._owner != os.getpid():
            raise RuntimeFault(
                "this launcher belongs to the parent process; make another after the fork"
            )
        if self._closed:
            raise RuntimeFault("the launcher is closed")
        self._has_started = True
        self._guardian.start()

    def _on_process_closed(self, process: Process) -> None:
        with self._lock:
            self._processes.discard(process)
        if process.status is not None:
            self._orphans.take_orphans(process.pid)
        self._guardian.drop_session(process.key)


class Guardian(Helper):
    """The guardian of one driver: the process that kills what is left when the driver dies.

    It runs from the first process of a tree to the last; one that exits is replaced, and its
    successor has the same file. `close` returns when it is gone.
    """

    def __init__(
        self, loop: EventLoop, tag: TreeTag, emit: Callable[[LoggedEvent], None] = discard_event
    ) -> None:
        super().__init__(loop, "guardian", self._start_process, replay=self._tell, emit=emit)
        self._loop = loop
        self._tag = tag
        self._file = descriptors.own(os.memfd_create("phalanx-guardian"))
        self._places: dict[tuple[int, int], int] = {}  # of sessions in it
        self._free: list[int] = []
        self._until = math.inf
        self._write(LEASE.pack(math.inf), 0)

    def add_session(self, key: tuple[int, int]) -> None:
        """Have the session of that leader killed with the driver."""
        with self.lock:
            place = self._free.pop() if self._free else len(self._places)
            self._places[key] = place
            self._write(SESSION.pack(*key), LEASE.size + place * SESSION.size)

    def drop_session(self, key: tuple[int, int]) -> None:
        """Forget the session of that leader."""
        with self.lock:
            if (place := self._places.pop(key, None)) is not None:
                self._free.append(place)
                self._write(SESSION.pack(0, 0), LEASE.size + place * SESSION.size)

    def keep_until(self, at: float) -> None:
        """Have everything killed at *at*, this process included, unless it is called again.

        In seconds of ``syscalls.boot_time``. To put the time off waits for nothing.
        """
        with self.lock:
            self._write(LEASE.pack(at), 0)
            is_earlier, self._until = at < self._until, at
            if is_earlier:  # else the guardian looks into the file in time
                self.send(b"look")

    def close(self, deadline: float, *, ask: bool = False) -> None:
        """End the process for good; see `Helper.end`."""
        super().close(deadline, ask=ask)
        with self.lock:
            if self._file >= 0 and not self.is_inherited:
                descriptors.close(self._file)
                self._file = -1

    def _start_process(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        return interpreter.start_helper(
            self._loop,
            "guardian",
            interpreter.bare_command("guardian_main"),
            [self._tag.pattern.decode()],
            control=control,
            on_exit=on_exit,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", ""), "PHALANX_TREE": self._tag.outer},
            cwd="/",
        )

    def _tell(self) -> Iterator[tuple[bytes, list[int]]]:
        yield b"look", [self._file]

    def _write(self, data: bytes, offset: int) -> None:
        if self._file >= 0:
            os.pwrite(self._file, data, offset)


def close_all(steps: Iterable[Callable[[], object]]) -> None:
    """Take every one of *steps*, also after one that raises; raise at the end.

    Raises:
        RuntimeFault: several have failed; with an `ExceptionGroup` as its cause. The error of one
            is raised as it is.
    """
    errors: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001  # raised below
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise RuntimeFault("; ".join(str(error) for error in errors)) from ExceptionGroup(
            "not everything could be closed", errors
        )
