"""Starting processes: forked from a zygote in milliseconds, or as new interpreters.

Guarantees: what was started is a child of this process, guarded from its first instruction on (it
dies with the driver, however the driver dies) and told to begin only when all of its batch exist;
a start that fails leaves nothing. Where forking is not safe (the preload left threads or a CUDA
context) new interpreters are started instead.

Left to others: the zygote, also its replacement (`forking`); what the processes do, and what their
end means (`process`). `close` kills what still lives: end your own first.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime.event import unheard
from phalanx.runtime.linux import descriptors, process_tree
from phalanx.runtime.linux.oom import OomEvidence
from phalanx.runtime.linux.process_tree import TreeMark
from phalanx.supervision import RuntimeFault, WouldDeadlock

from .guardian import Guardian
from .interpreter import start_interpreters
from .launch_spec import LaunchSpec
from .process import Process
from .reaper import Reapings
from .zygote import Forker, StartRequest, Vigil, always

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.linux.oom import OomSample
    from phalanx.runtime.threads.event_loop import Hub

__all__ = ["LaunchSpec", "Launcher"]


class Launcher:
    """Starts processes. Thread-safe; any number of launches may be under way at once.

    Args:
        preload: Modules the zygote imports before it forks; none makes it quick to boot.
        start_timeout: Seconds the zygote may take to import them.
        emit: Told of what happens to the helpers; may be called on the hub's thread.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        preload: Sequence[str] = ("torch",),
        start_timeout: float = 60.0,
        emit: Callable[[LoggedEvent], None] = unheard,
    ) -> None:
        self._hub = hub
        self._owner = os.getpid()
        self._mark = TreeMark.new(dict(os.environ))
        self._reapings = Reapings(hub)
        self._forker = Forker(
            hub,
            self._mark,
            self._reapings,
            preload=preload,
            start_timeout=start_timeout,
            emit=emit,
        )
        self._guardian = Guardian(hub, self._mark, emit)
        self._memory = OomEvidence()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._processes: set[Process] = set()
        self._closed = False

    @property
    def zygote_pid(self) -> int | None:
        """The process that others are forked from; None while there is none that can fork."""
        return self._forker.zygote_pid

    @property
    def guardian_pid(self) -> int | None:
        """The process that kills what is left when the driver dies; None before the first start."""
        return self._guardian.pid or None

    def warm(self) -> None:
        """Boot the zygote now, without waiting for it."""
        self._check()
        self._guardian.start()
        self._forker.warm()

    def launch(
        self,
        spec: LaunchSpec,
        *,
        on_exit: Callable[[Process], None],
        deadline: float,
        is_wanted: Callable[[], bool] = always,
    ) -> Process:
        """Start one process; return once it runs.

        Args:
            spec: What to start.
            on_exit: Called once with the process when it has ended, on the hub's thread; maybe
                before this returns.
            deadline: On the monotonic clock.
            is_wanted: Asked while it waits; where it returns False the launch is given up.

        Raises:
            SpecError: a module of the preload does not import, or the spec names what is not there.
            RuntimeFault: the machine would not start it, or not in time, or it was given up.
                Nothing is left of it.
        """
        return self.launch_many([spec], on_exit=on_exit, deadline=deadline, is_wanted=is_wanted)[0]

    def launch_many(
        self,
        specs: Iterable[LaunchSpec],
        *,
        on_exit: Callable[[Process], None],
        deadline: float,
        is_wanted: Callable[[], bool] = always,
    ) -> list[Process]:
        """Start all of *specs* or, where one fails, none of them; see `launch`."""
        specs = list(specs)
        if not specs:
            return []
        self._check()
        if self._hub.is_current():
            msg = "launching from the hub's own thread, which launching waits for"
            raise WouldDeadlock(msg)
        self._guardian.start()
        memory = self._memory.sample()
        vigil = Vigil(specs[0].label, is_wanted)
        requests: list[StartRequest] = []
        try:
            for spec in specs:
                number = next(self._numbers)
                mark = self._mark.of(number, spec.label)
                requests.append(StartRequest.of(number, spec, mark))
            forked = [request for request in requests if request.spec.method == "zygote"]
            if forked and not self._forker.fork(forked, deadline, vigil):
                forked = []
            rest = [request for request in requests if request not in forked]
            start_interpreters(self._hub, rest, deadline)
            vigil.check()
            return self._let_go(requests, on_exit, memory)
        except OSError as error:
            msg = f"could not start {specs[0].label!r}: {error}"
            raise RuntimeFault(msg) from error
        finally:
            for request in requests:
                request.close()
                if request.pidfd >= 0:  # nobody's process now: the launch has failed
                    self._reapings.discard(request)

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

        def end_tree() -> None:
            if not self._guardian.pid:
                return  # nothing was ever started
            sessions = [process.key for process in processes]
            left = process_tree.kill(
                process_tree.Quarry(self._mark.needle, sessions, sessions), deadline
            ).left
            if left:
                names = ", ".join(f"{one.pid} ({one.command})" for one in left)
                msg = f"processes withstood being killed: {names}"
                raise RuntimeFault(msg)

        def let_go() -> None:
            late: list[str] = []
            for process in processes:
                if not process.wait(deadline):
                    process.look()  # the hub may be closed
                if process.status is None:
                    late.append(f"{process.label} (pid {process.pid})")
                else:
                    process.close()
            if late:
                msg = f"processes have not ended in time: {', '.join(late)}"
                raise RuntimeFault(msg)

        close_all(
            [
                lambda: self._forker.close(deadline),
                end_tree,
                let_go,
                self._reapings.close,
                lambda: self._guardian.close(deadline),
            ]
        )

    def _let_go(
        self, requests: list[StartRequest], on_exit: Callable[[Process], None], memory: OomSample
    ) -> list[Process]:
        processes: list[Process] = []
        try:
            self._wrap(requests, processes, on_exit, memory)
        except BaseException:
            # Nothing has run in them yet. They are dealt with as those that have no handle.
            for request, process in zip(requests, processes, strict=False):
                pidfd = process.give_up()
                if pidfd >= 0:
                    request.pidfd = descriptors.own(pidfd)
            raise
        for request in requests:
            request.let_go()
        return processes

    def _wrap(
        self,
        requests: list[StartRequest],
        processes: list[Process],
        on_exit: Callable[[Process], None],
        memory: OomSample,
    ) -> None:
        """Add the handle of each of *requests* to *processes*."""
        for request in requests:
            task = process_tree.read(request.pid)
            if task is None:
                # Only with SIGCHLD ignored, or somebody waiting for any child, and a death
                # before its first instruction.
                task = process_tree.Task(request.pid, self._owner, request.pid, "X", 0)
            key = [task.key]
            process = Process(
                self._hub,
                request.pidfd,
                task,
                label=request.spec.label,
                quarry=process_tree.Quarry(
                    request.mark.needle, key, key if request.spec.new_session else ()
                ),
                memory=self._memory,
                memory_before=memory,
                on_exit=on_exit,
                on_close=self._on_process_closed,
                collect_later=partial(self._reapings.take, kill=False),
            )
            request.pidfd = -1  # the process's from here on
            processes.append(process)
            with self._lock:
                self._processes.add(process)
                closed = self._closed
            self._guardian.add_session(process.key)
            if closed:
                process.send_signal(signal.SIGKILL)

    def _check(self) -> None:
        if self._owner != os.getpid():
            msg = "this launcher belongs to the parent process; make another after the fork"
            raise RuntimeFault(msg)
        if self._closed:
            msg = "the launcher is closed"
            raise RuntimeFault(msg)

    def _on_process_closed(self, process: Process) -> None:
        with self._lock:
            self._processes.discard(process)
        self._guardian.drop_session(process.key)


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
        msg = "; ".join(str(error) for error in errors)
        raise RuntimeFault(msg) from ExceptionGroup("not everything could be closed", errors)
