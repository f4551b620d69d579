"""Client of the zygote: starts it, replaces it, and has it fork workers.

The driver's end of one zygote.

Guarantees: what the zygote says comes as values, on the hub's thread, in order, all of it before
word of its death; every descriptor that came with a message is owned by whoever got the message.

Left to others: what to do about it (`launcher`), and the other end (`zygote_main`).

Processes forked from a zygote: the zygote's life, and what is asked of it.

Guarantees: what was forked is a child of this process when `Forker.fork` returns, or nothing is
left of it. A zygote that died is replaced, also one that had to be killed because it was stopped
while a fork waited for it, and a fork that was under way then is done again; it cannot have
happened twice, because nothing runs in a new process before its `let_go`. Where forking is not
safe, one event says so and `fork` returns False from then on.

Left to others: the zygote's own end (`zygote_main`), and letting the processes go (`launcher`).

One process on its way: what it is started with, and how far it has come.

Guarantees: it begins nothing before `let_go`; the descriptors that only the start needs are closed
by `close`, once.

Left to others: bringing it into the world (`forking`, `interpreter`), and taking its pidfd over.

What one launch sees to while it waits for a zygote.

Guarantees: a launch that nobody wants any more waits no longer; a zygote that is stopped, and not
by a debugger, is killed after two seconds of it, for it would fork nobody and nothing else would
find it.

Left to others: its replacement, and beginning anew (`forking`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from phalanx.runtime.linux import descriptors, process_tree, syscalls
from phalanx.runtime.linux.descriptors import receive_with_fds
from phalanx.runtime.linux.process_tree import VARIABLE
from phalanx.supervision import RuntimeFault, SpecError

from . import interpreter, reaper
from .events import ForkUnsafe, ZygoteReplaced
from .zygote_main import REQUEST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.runtime.event import LoggedEvent
    from phalanx.runtime.linux.process_tree import TreeMark, WorkerMark
    from phalanx.runtime.threads.event_loop import Hub

    from .launch_spec import LaunchSpec
    from .reaper import Reapings


LOOK = 0.25
"""Seconds between two looks."""

_LOOKS = 8  # how often in a row it may be found stopped; counted, for this process may stop too


class Waited(Protocol):
    """Whom a launch waits for: the zygote."""

    def is_stopped(self) -> bool: ...  # noqa: D102  # it says so itself
    def kill(self) -> None: ...  # noqa: D102  # as above


class Vigil:
    """One launch's. Used by one thread.

    Args:
        what: What is being launched, for people.
        is_wanted: Whether it is still wanted.
    """

    def __init__(self, what: str, is_wanted: Callable[[], bool]) -> None:
        self._what = what
        self._is_wanted = is_wanted
        self._stopped = 0

    def check(self) -> None:
        """Raise RuntimeFault where the launch is not wanted any more."""
        if not self._is_wanted():
            msg = f"{self._what!r} was withdrawn before it had been started"
            raise RuntimeFault(msg)

    def look(self, zygote: Waited) -> bool:
        """Return whether *zygote*, which has said nothing for a while, had to be killed for it."""
        self._stopped = self._stopped + 1 if zygote.is_stopped() else 0
        if self._stopped <= _LOOKS:
            return False
        self._stopped = 0
        zygote.kill()
        return True


def always() -> bool:
    """Say that something is wanted, whatever happens."""
    return True


@dataclass(slots=True, eq=False)
class StartRequest:
    """One process on its way.

    Attributes:
        number: What its starter calls it.
        file: Holds its birth, for the child to read.
        go: Our end of the pipe at whose other end, *awaits*, the child waits for word.
        state: ``asked``; ``born`` (it exists, and waits); ``parted`` (and is our child).
        pidfd: Ours once it is born, until somebody takes it over; else -1.
        problem: Why it will not be.
    """

    number: int
    spec: LaunchSpec
    mark: WorkerMark
    file: int
    go: int
    awaits: int
    state: Literal["asked", "born", "parted"] = "asked"
    pidfd: int = -1
    pid: int = 0
    problem: str = ""

    @classmethod
    def of(cls, number: int, spec: LaunchSpec, mark: WorkerMark) -> Self:
        """Return a request with descriptors of its own."""
        awaits, go = _pipe()
        try:
            file = descriptors.own(spec.birth(mark).to_file())
        except BaseException:
            descriptors.close(awaits)
            descriptors.close(go)
            raise
        return cls(number, spec, mark, file, go, awaits)

    @property
    def outputs(self) -> tuple[int, int]:
        """The child's 1 and 2, as descriptors of ours; a closed one of ours stays closed."""
        return (
            1 if self.spec.stdout is None else self.spec.stdout,
            2 if self.spec.stderr is None else self.spec.stderr,
        )

    @property
    def fds(self) -> list[int]:
        """What goes to the zygote with the request, in its order."""
        return [self.file, self.awaits, *self.outputs, *self.spec.fds.values()]

    def check_fds(self) -> None:
        """Raise SpecError where the spec names a descriptor that is not open."""
        stdout, stderr = self.outputs
        for name, fd in {**self.spec.fds, "stdout": stdout, "stderr": stderr}.items():
            try:
                os.fstat(fd)
            except OSError as error:
                raise SpecError(f"fds[{name!r}]", fd, "pass an open descriptor") from error

    def let_go(self) -> None:
        """Have it begin."""
        with contextlib.suppress(BrokenPipeError):  # dead already: its death will be told
            os.write(self.go, b"g")

    def take_pidfd(self) -> int:
        """Return the pidfd, which is the caller's from now on, or -1 where there is none."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd if pidfd < 0 else descriptors.disown(pidfd)

    def begin_anew(self) -> None:
        """Be as if it had never been asked for; what came of it has been killed."""
        self.state = "asked"
        if self.go >= 0:
            # Another pipe for the next attempt: the dying process could still take our word.
            descriptors.close(self.go)
            descriptors.close(self.awaits)
            self.awaits, self.go = _pipe()

    def close(self) -> None:
        """Close the descriptors that only the start needs."""
        for fd in (self.file, self.go, self.awaits):
            if fd >= 0:
                descriptors.close(fd)
        self.file = self.go = self.awaits = -1


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    return descriptors.own(read), descriptors.own(write)


# A module of the preload that asks torch whether there is a GPU must not start CUDA by that, for
# nothing could be forked from then on. A worker's environment is its own, without this.
_ASK_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_LARGEST = 1 << 17
_START = 5.0  # seconds for the death of one that could not be watched


@dataclass(frozen=True, slots=True)
class ZygoteSaid:
    """One message.

    Attributes:
        kind: ``ready`` (the preload is imported), ``import_failed``, ``born`` (a worker exists,
            its pidfd came along), ``parted`` (workers are the driver's children now),
            ``refused`` (the kernel would not fork), ``unfit`` (forking would not be safe).
        ids: The numbers of the requests it is about.
        pidfd: The worker's, or -1.
        text: The problem, or the traceback.
    """

    kind: Literal["ready", "import_failed", "born", "parted", "refused", "unfit"]
    ids: tuple[int, ...] = ()
    pid: int = 0
    pidfd: int = -1
    module: str = ""
    text: str = ""


class Zygote:
    """One zygote process, from its start to its end."""

    def __init__(
        self,
        hub: Hub,
        mark: TreeMark,
        preload: Sequence[str],
        *,
        on_message: Callable[[Zygote, ZygoteSaid], None],
        on_exit: Callable[[Zygote, str], None],
    ) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._gone = False  # or somebody is about to collect it
        self._lock = threading.Lock()
        self.is_ready = False
        with contextlib.ExitStack() as failed:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                failed.callback(ours.close)
                with theirs, os.fdopen(os.pidfd_open(os.getpid()), "rb") as driver:
                    fds = (theirs.fileno(), driver.fileno())
                    arguments = [*map(str, fds), mark.needle.decode(), json.dumps(preload)]
                    self.pid, self._pidfd = interpreter.start(
                        "the zygote",
                        interpreter.command("process.zygote_main", arguments, tuple(sys.path)),
                        pass_fds=fds,
                        stdin=subprocess.DEVNULL,
                        stdout=None if _is_open(1) else subprocess.DEVNULL,
                        stderr=None if _is_open(2) else subprocess.DEVNULL,
                        env={**_ASK_NVML, **os.environ, VARIABLE: mark.of(0, "zygote").value},
                        start_new_session=True,
                    )
            except OSError as error:
                msg = f"the zygote could not be started: {error}"
                raise RuntimeFault(msg) from error
            self._sock = descriptors.own(ours)
            failed.pop_all()
        ours.setblocking(False)
        self.started_at = time.monotonic()
        # Under the lock, for which the callbacks wait: they may be called before there are names
        # for the watches.
        with self._lock:
            try:
                self._sock_watch = hub.watch(ours.fileno(), select.EPOLLIN, self._on_readable)
                self._exit_watch = hub.watch(self._pidfd, select.EPOLLIN, self._on_death)
            except BaseException:
                self._gone = True
                self._end(time.monotonic() + _START)
                raise

    def request(self, number: int, fds: Sequence[int], deadline: float) -> None:
        """Ask for a worker; its answers bear *number*. Raises OSError where the zygote is gone."""
        packet = REQUEST.pack(number)
        while True:
            try:
                socket.send_fds(self._sock, [packet], list(fds))
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._sock, select.POLLOUT)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise TimeoutError from None
            else:
                return

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP) and not by a debugger: it would take no order."""
        task = None if self._gone else process_tree.read(self.pid)
        return task is not None and task.state == "T"

    def kill(self) -> None:
        """Kill it; its death is told as any other."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._gone:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self, deadline: float) -> None:
        """Kill it and let go, without a word to anybody; raises where it withstands."""
        self._exit_watch.cancel()
        self._sock_watch.cancel()
        if self._take():
            self._end(deadline)

    def _take(self) -> bool:
        """Return True once: for who is to collect it."""
        with self._lock:
            gone, self._gone = self._gone, True
            return not gone

    def _end(self, deadline: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            self._gone = False  # it can be closed again
            msg = f"the zygote (pid {self.pid}) could not be ended in time"
            raise RuntimeFault(msg)
        self._collect()

    def _is_gone(self) -> bool:
        with self._lock:
            return self._gone

    def _on_readable(self, _events: int) -> None:
        while not self._is_gone():
            try:
                said = self._receive()
            except BlockingIOError:
                return
            except OSError:
                said = None
            if said is None:
                self._sock_watch.cancel()  # the end of it; its death comes by the pidfd
                return
            self._on_message(self, said)

    def _receive(self) -> ZygoteSaid | None:
        data, fds = receive_with_fds(self._sock, _LARGEST, 1)
        if not data:
            return None
        message: dict[str, Any] = json.loads(data)
        text = message.get("problem") or message.get("traceback") or message.get("unfit") or ""
        if message["kind"] == "ready":
            self.is_ready = True
        return ZygoteSaid(
            kind=message["kind"],
            ids=tuple(message.get("ids", ())),
            pid=message.get("pid", 0),
            pidfd=fds[0] if fds else -1,
            module=message.get("module", ""),
            text=text,
        )

    def _on_death(self, _events: int) -> None:
        if self._is_gone() or not process_tree.is_gone(self._pidfd):
            return
        self._on_readable(0)  # what it said before it died
        self._exit_watch.cancel()
        self._sock_watch.cancel()
        if self._take():
            self._on_exit(self, self._collect())

    def _collect(self) -> str:
        """Reap it, close everything, and return how it ended, for people."""
        status = None
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            _, status = os.waitpid(self.pid, os.WNOHANG)
        if status is None:
            status = syscalls.exit_status_of(self._pidfd)
        descriptors.close(self._pidfd)
        descriptors.close(self._sock)
        if status is None:
            return "its exit status was collected by somebody else"
        if os.WIFSIGNALED(status):
            return f"signal {os.WTERMSIG(status)}"
        return f"exit code {os.WEXITSTATUS(status)}"


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


_ATTEMPTS = 3  # how often a launch is begun anew because its zygote died under it
_CALM = 1.0  # seconds a zygote must live before its death is answered at once


@dataclass(slots=True, eq=False)
class _Boot:
    """One zygote and what has become of it."""

    zygote: Zygote
    is_ready: bool = False
    is_gone: bool = False
    was_stopped: bool = False
    error: Callable[[], Exception] | None = None
    waiting: dict[int, StartRequest] = field(default_factory=dict[int, "StartRequest"])


class Forker:
    """Forks processes. Thread-safe; the arguments are those of `Launcher`.

    Args:
        reapings: Who collects what came of a fork that failed.
    """

    def __init__(
        self,
        hub: Hub,
        mark: TreeMark,
        reapings: Reapings,
        *,
        preload: Sequence[str],
        start_timeout: float,
        emit: Callable[[LoggedEvent], None],
    ) -> None:
        for name in preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise SpecError("preload", name, "name importable modules, such as 'torch'")
        if start_timeout <= 0:
            raise SpecError("start_timeout", start_timeout, "give a positive number of seconds")
        self._hub = hub
        self._mark = mark
        self._reapings = reapings
        self._preload = tuple(preload)
        self._start_timeout = start_timeout
        self._emit = emit
        self._condition = threading.Condition()
        self._boot: _Boot | None = None
        self._ending: Zygote | None = None  # since `close`
        self._unfit = ""
        self._closed = False

    @property
    def zygote_pid(self) -> int | None:
        """The zygote; None while there is none that can fork."""
        boot = self._boot
        return boot.zygote.pid if boot is not None and boot.is_ready else None

    def warm(self) -> None:
        """Boot the zygote now, without waiting for it."""
        with self._condition:
            if self._boot is None and not self._unfit and not self._closed:
                self._start_zygote()

    def fork(self, requests: list[StartRequest], deadline: float, vigil: Vigil) -> bool:
        """Have the zygote fork all of *requests*; return False where it must not fork.

        Raises:
            SpecError: a module of the preload does not import, or a descriptor is not open.
            RuntimeFault: it could not be done by *deadline*, on the monotonic clock, or is not
                wanted any more.
        """
        for _ in range(_ATTEMPTS):
            boot = self._ready_zygote(deadline, vigil)
            if boot is None:
                return False
            reaper.open_window()
            try:
                if self._ask(boot, requests, deadline, vigil):
                    return True
            finally:
                with self._condition:
                    for request in requests:
                        boot.waiting.pop(request.number, None)
                if reaper.close_window():
                    self._reapings.take_adopted()
            for request in requests:
                # It has not been told to go, so it is as if it had never been.
                self._reapings.discard(request)
            if self._unfit:
                return False
        msg = f"the zygote died {_ATTEMPTS} times during one launch; see its stderr"
        raise RuntimeFault(msg)

    def close(self, deadline: float) -> None:
        """End the zygote, or try again; who waits for it hears that the launcher was closed."""
        with self._condition:
            self._closed = True
            if self._boot is not None:
                self._ending, self._boot = self._boot.zygote, None
            self._condition.notify_all()
            zygote = self._ending
        if zygote is not None:
            zygote.close(deadline)

    # --- one launch, in the caller's thread -----------------------------------------------

    def _ask(
        self, boot: _Boot, requests: list[StartRequest], deadline: float, vigil: Vigil
    ) -> bool:
        """Return True when all of *requests* are our children, False where the zygote is gone."""
        with self._condition:
            boot.waiting.update({request.number: request for request in requests})
        for request in requests:
            try:
                self._request(boot, request, deadline, vigil)
            except TimeoutError:
                break
            except OSError:
                request.check_fds()
                break  # the zygote is gone; word of it is on its way
        with self._condition:
            while not all(request.state == "parted" for request in requests):
                problem = next((r.problem for r in requests if r.problem), "")
                if problem:
                    msg = f"could not start {requests[0].spec.label!r}: {problem}"
                    raise RuntimeFault(msg)
                if boot.is_gone or self._unfit:
                    return False
                late = f"{requests[0].spec.label!r} was not there in time"
                self._wait(boot, deadline, late, vigil)
        return True

    def _request(self, boot: _Boot, request: StartRequest, deadline: float, vigil: Vigil) -> None:
        """Ask the zygote for one process; raises as `Zygote.request` does."""
        while True:
            vigil.check()
            until = min(deadline, time.monotonic() + LOOK)
            try:
                boot.zygote.request(request.number, request.fds, until)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                self._look(boot, vigil)
            else:
                return

    def _ready_zygote(self, deadline: float, vigil: Vigil) -> _Boot | None:
        """Return a zygote that forks, or has just died; None where none may be used here."""
        with self._condition:
            if self._unfit:
                return None
            boot = self._boot or self._start_zygote()
            limit = boot.zygote.started_at + self._start_timeout
            while not boot.is_ready and boot.error is None and not boot.is_gone:
                if time.monotonic() >= limit:
                    boot.zygote.kill()
                    msg = (
                        f"the zygote had not imported {self._imports} within "
                        f"start_timeout={self._start_timeout:.3g} s and was ended: what imports "
                        "for so long, or hangs, is for the workers to import; leave it out of "
                        "preload"
                    )
                    raise RuntimeFault(msg)
                until = min(deadline, limit)
                self._wait(
                    boot,
                    until,
                    f"the zygote had not imported {self._imports} in the "
                    f"{until - boot.zygote.started_at:.3g} s since it was started, and goes on "
                    "importing; raise start_timeout, or leave it out of preload",
                    vigil,
                    raises=deadline < limit,
                )
            if boot.error is not None:
                raise boot.error()
            return None if self._unfit else boot

    @property
    def _imports(self) -> str:
        """What the zygote imports, for people."""
        return ", ".join(self._preload) or "phalanx"

    def _wait(
        self, boot: _Boot, deadline: float, late: str, vigil: Vigil, *, raises: bool = True
    ) -> None:
        """Wait a while for news, and at *deadline* raise *late*; the condition is held."""
        if self._closed:
            msg = "the launcher was closed"
            raise RuntimeFault(msg)
        if self._condition.wait(max(0.0, min(deadline - time.monotonic(), LOOK))):
            return
        # Only now: what is being forked is there in a moment, and can then be ended for certain.
        vigil.check()
        if time.monotonic() < deadline:
            self._look(boot, vigil)
        elif raises:
            raise RuntimeFault(late)

    def _look(self, boot: _Boot, vigil: Vigil) -> None:
        if vigil.look(boot.zygote):
            boot.was_stopped = True

    # --- the zygote, on the hub's thread --------------------------------------------------

    def _start_zygote(self) -> _Boot:
        if self._closed:
            msg = "the launcher was closed"
            raise RuntimeFault(msg)
        zygote = Zygote(
            self._hub,
            self._mark,
            self._preload,
            on_message=self._on_message,
            on_exit=self._on_exit,
        )
        self._boot = _Boot(zygote)
        return self._boot

    def _on_message(self, zygote: Zygote, said: ZygoteSaid) -> None:
        with self._condition:
            boot = self._boot
            known = boot if boot is not None and boot.zygote is zygote else None
            waiting = known.waiting if known is not None else {}
            requests = [waiting[number] for number in said.ids if number in waiting]
            match said.kind:
                case "ready":
                    if known is not None:
                        known.is_ready = True
                    if said.text:
                        self._note_unfit(said.text)
                case "import_failed":
                    if known is not None:
                        known.error = lambda: _import_error(said)
                case "born":
                    if said.pidfd < 0:
                        # It came without: this process had none free. It waits for the word to
                        # go, which never comes, and ends.
                        self._reapings.take_number(said.pid)
                        for request in requests:
                            request.problem = "the driver had no descriptor free for its pidfd"
                    elif requests:
                        requests[0].state = "born"
                        requests[0].pid = said.pid
                        requests[0].pidfd = descriptors.own(said.pidfd)
                        reaper.claim(said.pid)
                    else:
                        self._reapings.take(said.pidfd, said.pid, kill=True)
                case "parted":
                    for request in requests:
                        if request.state == "born":
                            request.state = "parted"
                        else:
                            request.problem = request.problem or "it was killed while being forked"
                case "refused":
                    for request in requests:
                        request.problem = said.text
                case "unfit":
                    self._note_unfit(said.text)
            self._condition.notify_all()

    def _note_unfit(self, problem: str) -> None:
        if not self._unfit:
            self._unfit = problem
            self._emit(ForkUnsafe(problem=problem, at=time.monotonic()))
        if self._boot is not None:
            self._boot.zygote.kill()

    def _on_exit(self, zygote: Zygote, how: str) -> None:
        with self._condition:
            boot = self._boot
            if boot is None or boot.zygote is not zygote:
                return
            boot.is_gone = True
            self._boot = None
            if boot.was_stopped:
                how = "it was stopped while processes were to be forked, and was killed"
            elif not boot.is_ready and boot.error is None:
                msg = f"the zygote ended while it imported {self._imports}: {how}"
                boot.error = lambda: RuntimeFault(msg)
            self._condition.notify_all()
            is_replaced = boot.is_ready or boot.was_stopped
            if not is_replaced or self._unfit or self._closed:
                return
        lived = time.monotonic() - zygote.started_at
        # Whatever kills it at once must not make us start processes in a loop.
        wait = max(0.0, _CALM - lived)
        self._hub.call_at(time.monotonic() + wait, lambda: self._replace(zygote.pid, how))

    def _replace(self, dead: int, how: str) -> None:
        with self._condition:
            if self._closed:
                return
            boot = self._boot or self._start_zygote()
        pid = boot.zygote.pid
        self._emit(ZygoteReplaced(pid=pid, replaced=dead, reason=how, at=time.monotonic()))


def _import_error(said: ZygoteSaid) -> SpecError:
    last = said.text.strip().rpartition("\n")[2]
    error = SpecError("preload", said.module, f"it does not import in the zygote: {last}")
    error.add_note(said.text)
    return error
