"""Client of a zygote, the process that has imported the preloaded modules and forks workers.

- When `Zygote.fork` returns True, all requested processes are children of this process and have not
  begun: nothing runs in them before `StartRequest.release`. Otherwise nothing is left of them.
- A zygote that exits is replaced, and so is one that is found stopped (SIGSTOP) while a launch
  waits for it. A fork that was in progress is repeated; nothing can have run twice.
- If forking is not safe (the preload left threads or a CUDA context), one event says so, and `fork`
  returns False from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from phalanx.runtime.event import Event, LoggedEvent
from phalanx.runtime.linux import descriptor_limit, descriptors
from phalanx.runtime.linux.process_tree import VARIABLE, ProcessTag, TreeTag
from phalanx.supervision import ExitReason, RuntimeFault, SpecError

from . import interpreter, orphan_reaper
from .child_main import ChildStart, import_path
from .helper import Helper
from .zygote_main import REQUEST

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.runtime.threads.event_loop import EventLoop

    from .child_main import LaunchSpec
    from .child_process import Process
    from .orphan_reaper import Reaper


class ForkUnsafe(Event, event="fork_unsafe", level="warning"):
    """The zygote must not be forked: workers are started as fresh interpreters, which is slow.

    Attributes:
        problem: Leftovers of the preload: threads, or a CUDA context.
    """

    problem: str


SLICE = 0.25
"""Seconds after which a launch that waits looks whether it is still wanted."""

_STOPPED = 8  # slices in a row; counted and not timed, for this process may have been stopped too
_ATTEMPTS = 3  # of a launch under which its zygote dies
# A module that queries torch for a GPU must not initialise CUDA by that: nothing could be
# forked from then on. Workers have their own environment, without this.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# By the loader, the C library, an allocator that is preloaded, and Python.
_AT_START = ("GLIBC_TUNABLES", "LD_", "MALLOC_", "MIMALLOC_", "TCMALLOC_", "PYTHON")


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *env* that a program reads only as it starts, not when it forks."""
    return {name: value for name, value in env.items() if name.startswith(_AT_START)}


@dataclass(slots=True)
class LaunchWait:
    """The conditions under which one launch goes on waiting.

    Attributes:
        label: Of the first process, for errors.
        deadline: On the monotonic clock.
    """

    label: str
    deadline: float
    is_wanted: Callable[[], bool] = lambda: True
    stopped: int = 0  # slices for which the zygote has been found stopped

    def check(self) -> None:
        """Raise RuntimeFault if the launch is no longer wanted."""
        if not self.is_wanted():
            raise RuntimeFault(f"{self.label!r} was withdrawn before it had been started")


@dataclass(slots=True, eq=False)
class StartRequest:
    """One process from the request to its release.

    Attributes:
        number: Unique in the launcher.
        file: A memfd with its `ChildStart`.
        go: The driver's end of the pipe at whose other end, *awaits*, the process waits.
        pidfd: Owned by this object once it is forked; else -1.
        is_ours: Whether it is our child, and waits.
    """

    number: int
    spec: LaunchSpec
    tag: ProcessTag
    file: int
    go: int
    awaits: int
    pidfd: int = -1
    is_ours: bool = False
    pid: int = 0
    problem: str = ""

    @classmethod
    def of(cls, number: int, spec: LaunchSpec, tag: ProcessTag) -> Self:
        """Return a request with descriptors of its own."""
        spec = spec.complete()
        start = ChildStart(spec, os.getpid(), tag.value, descriptor_limit.own_limit())
        file = descriptors.own(start.to_file())
        with descriptors.closed_on_error(file):
            awaits, go = _pipe()
        return cls(number, spec, tag, file, go, awaits)

    @property
    def fds(self) -> list[int]:
        """The descriptors that are sent to the zygote, in its order."""
        out, err = self.spec.stdout, self.spec.stderr
        outputs = 1 if out is None else out, 2 if err is None else err
        return [self.file, self.awaits, *outputs, *self.spec.fds.values()]

    def check_fds(self) -> None:
        """Raise SpecError if the spec names a descriptor that is not open."""
        for name, fd in zip(("stdout", "stderr", *self.spec.fds), self.fds[2:], strict=True):
            if not _is_open(fd):
                raise SpecError(f"fds[{name!r}]", fd, "pass an open descriptor")

    def release(self) -> None:
        """Let the process begin."""
        with contextlib.suppress(BrokenPipeError):  # it has exited, which its pidfd reports
            os.write(self.go, b"g")

    def discard(self, orphan_reaper: Reaper) -> None:
        """Kill the process if there is one, so that another can be started."""
        if self.pidfd >= 0:
            pidfd, self.pidfd = descriptors.disown(self.pidfd), -1
            orphan_reaper.end(pidfd, self.pid)
        self.is_ours = False
        if self.go >= 0:
            # Another pipe for the next attempt: the dying process could still read from this one.
            descriptors.close(self.go)
            descriptors.close(self.awaits)
            self.awaits = self.go = -1  # no descriptor may be free for another
            self.awaits, self.go = _pipe()

    def close(self) -> None:
        """Close the descriptors that only the start needs."""
        for fd in (self.file, self.go, self.awaits):
            if fd >= 0:
                descriptors.close(fd)
        self.file = self.go = self.awaits = -1


@dataclass(slots=True, eq=False)
class _Boot:
    """The state of one zygote process."""

    started_at: float
    is_ready: bool = False
    is_gone: bool = False
    was_stopped: bool = False
    error: Callable[[], Exception] | None = None
    waiting: dict[int, StartRequest] = field(default_factory=dict[int, "StartRequest"])


class Zygote:
    """The zygote of one preload, through all its processes. Thread-safe.

    Args:
        variables: Of its environment, over the driver's.
    """

    def __init__(
        self,
        loop: EventLoop,
        tag: TreeTag,
        orphan_reaper: Reaper,
        preload: Sequence[str],
        variables: Mapping[str, str],
        *,
        start_timeout: float,
        emit: Callable[[LoggedEvent], None],
    ) -> None:
        self._loop = loop
        self._tag = tag
        self._orphans = orphan_reaper
        self._preload = tuple(preload)
        self._variables = variables
        self._imports = ", ".join(preload) or "phalanx"
        self._start_timeout = start_timeout
        self._emit = emit
        self._condition = threading.Condition()
        self._boot: _Boot | None = None  # the present or the last process
        # By pid: the end of a process may be reported after its successor was started.
        self._boots: dict[int, _Boot] = {}
        self._unfit = ""
        self._closed = False
        self._helper = Helper(
            loop,
            "zygote",
            self._spawn,
            on_message=self._on_message,
            on_exit=self._exited,
            emit=emit,
        )

    @property
    def pid(self) -> int | None:
        """The process; None while there is none that can fork."""
        boot = self._boot
        return self._helper.pid if boot is not None and boot.is_ready else None

    def warm(self) -> None:
        """Start it now, without waiting for its imports."""
        if not self._unfit and not self._closed:
            self._helper.start()

    def fork(self, requests: list[StartRequest], wait: LaunchWait) -> bool:
        """Fork all of *requests*; return False if this zygote must not fork.

        Raises:
            SpecError: a module of the preload does not import, or a descriptor is not open.
            RuntimeFault: it could not be done in time, or is no longer wanted.
        """
        for _ in range(_ATTEMPTS):
            boot = self._await_ready(wait)
            if boot is None:
                return False
            orphan_reaper.open_window()
            try:
                if self._ask(boot, requests, wait):
                    return True
            finally:
                with self._condition:
                    for request in requests:
                        boot.waiting.pop(request.number, None)
                if orphan_reaper.close_window():
                    self._orphans.take_adopted()
            for request in requests:
                request.discard(self._orphans)  # not released: nothing has run in it
            if self._unfit:
                return False
        raise RuntimeFault(f"the zygote died {_ATTEMPTS} times during one launch; see its stderr")

    def close(self, deadline: float) -> None:
        """End it; launches that wait for it fail. Called again it ends what is left.

        Raises:
            RuntimeFault: it was still there at *deadline* (monotonic).
        """
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._helper.close(deadline)

    # --- in the launching thread ------------------------------------------------------------

    def _await_ready(self, wait: LaunchWait) -> _Boot | None:
        """Return a process that forks, or has just exited; None if none may fork."""
        if self._unfit:
            return None
        self._check()
        self._helper.start()
        with self._condition:
            boot = self._boot
            assert boot is not None
            limit = boot.started_at + self._start_timeout
            while not boot.is_ready and boot.error is None and not boot.is_gone:
                now = time.monotonic()
                if now >= limit:
                    self._helper.kill()
                if now >= min(limit, wait.deadline):
                    raise RuntimeFault(
                        f"the zygote had not imported {self._imports} in the "
                        f"{now - boot.started_at:.3g} s since it was started: raise start_timeout="
                        f"{self._start_timeout:.3g} s, or remove the slow module from preload: "
                        "workers then import it themselves"
                    )
                self._wait(boot, min(wait.deadline, limit), wait)
            if boot.error is not None:
                raise boot.error()
            return None if self._unfit else boot

    def _ask(self, boot: _Boot, requests: list[StartRequest], wait: LaunchWait) -> bool:
        """Return True once all of *requests* are our children, False if the zygote has exited."""
        with self._condition:
            boot.waiting.update({request.number: request for request in requests})
        for request in requests:
            wait.check()
            with self._helper.lock:
                # It has exited; its successor, which imports, would be killed by a message.
                if self._boot is not boot:
                    break
                try:
                    if not self._helper.send(REQUEST.pack(request.number), request.fds):
                        break
                except OSError:
                    request.check_fds()
                    raise
        with self._condition:
            while not all(request.is_ours for request in requests):
                problem = next((r.problem for r in requests if r.problem), "")
                if problem:
                    raise RuntimeFault(f"could not start {wait.label!r}: {problem}")
                if boot.is_gone or self._unfit:
                    return False
                if time.monotonic() >= wait.deadline:
                    # The process between may be stopped, for which it waits.
                    self._helper.kill("it did not fork a process in time, and was killed")
                    raise RuntimeFault(f"{wait.label!r} was not there in time")
                self._wait(boot, wait.deadline, wait)
        return True

    def _wait(self, boot: _Boot, until: float, wait: LaunchWait) -> None:
        """Wait a slice for news, at most *until*; with the condition held."""
        self._check()
        if self._condition.wait(max(0.0, min(until - time.monotonic(), SLICE))):
            return
        # Only now: what is being forked exists in a moment, and can be killed for certain then.
        wait.check()
        wait.stopped = wait.stopped + 1 if self._helper.is_stopped else 0
        if wait.stopped > _STOPPED:
            wait.stopped = 0
            boot.was_stopped = True
            self._helper.kill("it was stopped while processes were to be forked, and was killed")

    def _check(self) -> None:
        if self._closed:
            raise RuntimeFault("the launcher was closed")

    # --- the helper --------------------------------------------------------------------------

    def _spawn(self, control: socket.socket, on_exit: Callable[[Process], None]) -> Process:
        boot = _Boot(time.monotonic())
        process = interpreter.start_helper(
            self._loop,
            "zygote",
            interpreter.command(
                "phalanx.runtime.process.zygote_main", import_path(self._variables)
            ),
            [self._tag.pattern.decode(), json.dumps(self._preload)],
            control=control,
            on_exit=on_exit,
            stdout=None if _is_open(1) else subprocess.DEVNULL,
            stderr=None if _is_open(2) else subprocess.DEVNULL,
            env={
                **_ASK_NVML,
                **os.environ,
                **self._variables,
                VARIABLE: self._tag.of(0, "zygote").value,
            },
        )
        self._boot = self._boots[process.pid] = boot
        return process

    def _on_message(self, data: bytes, fds: list[int]) -> None:
        message: dict[str, Any] = json.loads(data)
        with self._condition:
            boot = self._boot
            assert boot is not None
            ids: list[int] = message.get("ids", [])
            requests = [boot.waiting[number] for number in ids if number in boot.waiting]
            match message["kind"]:
                case "ready":
                    boot.is_ready = True
                case "import_failed":
                    module, trace = message["module"], message["traceback"]
                    boot.error = lambda: _import_error(module, trace)
                case "forked" if not fds:
                    # This process had no descriptor free for the pidfd. The process waits for its
                    # release, which never comes, and exits.
                    self._orphans.take_number(message["pid"])
                    for request in requests:
                        request.problem = "the driver had no descriptor free for its pidfd"
                case "forked" if requests:
                    requests[0].pid = message["pid"]
                    requests[0].pidfd = descriptors.own(fds[0])
                    orphan_reaper.owned.add(message["pid"])
                case "forked":
                    self._orphans.take(fds[0], message["pid"], kill=True)
                case "reparented":
                    for request in requests:
                        request.is_ours = request.pidfd >= 0
                        if not request.is_ours:
                            request.problem = request.problem or "it was killed while being forked"
                case _:  # "refused"
                    for request in requests:
                        request.problem = message.get("problem", "")
            if problem := message.get("unfit"):
                if not self._unfit:
                    self._unfit = problem
                    self._emit(ForkUnsafe(problem=problem, at=time.monotonic()))
                self._helper.kill()
            self._condition.notify_all()

    def _exited(self, pid: int | None, reason: ExitReason) -> bool:
        with self._condition:
            if pid is None:
                return not self._closed  # it could not be started, and is tried again
            boot = self._boots.pop(pid)
            boot.is_gone = True
            if not boot.is_ready and not boot.was_stopped and boot.error is None:
                given = "".join(f", with {k}={v!r}" for k, v in self._variables.items())
                msg = f"the zygote ended while it imported {self._imports}{given}: {reason.detail}"
                boot.error = lambda: RuntimeFault(msg)
            self._condition.notify_all()
            return (boot.is_ready or boot.was_stopped) and not self._unfit and not self._closed


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    return descriptors.own(read), descriptors.own(write)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _import_error(module: str, trace: str) -> SpecError:
    last = trace.strip().rpartition("\n")[2]
    error = SpecError("preload", module, f"it does not import in the zygote: {last}")
    error.add_note(trace)
    return error
