"""Starting processes: forked from a zygote in milliseconds, or as new interpreters.

Guarantees: what was started is a child of this process, guarded from its first instruction on (it
dies with the driver, however the driver dies) and told to begin only when all of its batch exist;
a start that fails leaves nothing. A zygote or a guardian that was killed is replaced; a launch
that was under way then is done again, and cannot have happened twice, because nothing runs in a
new process until the driver says go. Where forking is not safe (the preload left threads or a CUDA
context) new interpreters are started instead, and one event says so.

Left to others: what the processes do, and what their end means (`process`). `close` kills what
still lives: end your own first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from phalanx.supervision import RuntimeFault, SpecError, WouldDeadlock

from . import ledger, subreaper, tree
from .events import ForkUnsafe, ZygoteReplaced, unheard
from .evidence import OomEvidence
from .guardian import Guardian
from .interpreter import start_interpreter
from .launch_spec import LaunchSpec
from .marks import TreeMark, WorkerMark
from .process import Process
from .reaping import Reaping
from .zygote import Zygote, ZygoteSaid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .events import LoggedEvent
    from .evidence import OomSample
    from .hub import Hub

__all__ = ["LaunchSpec", "Launcher"]

_ATTEMPTS = 3  # how often a launch is begun anew because its zygote died under it
_CALM = 1.0  # seconds a zygote must live before its death is answered at once


@dataclass(slots=True, eq=False)
class _Request:
    """One process on its way.

    Attributes:
        state: ``asked``; ``born`` (it exists, and waits); ``parted`` (and is our child).
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

    def close(self) -> None:
        """Close the descriptors that only the start needs."""
        for fd in (self.file, self.go, self.awaits):
            if fd >= 0:
                ledger.close(fd)
        self.file = self.go = self.awaits = -1


@dataclass(slots=True, eq=False)
class _Boot:
    """One zygote and what has become of it."""

    zygote: Zygote
    is_ready: bool = False
    is_gone: bool = False
    error: Callable[[], Exception] | None = None
    waiting: dict[int, _Request] = field(default_factory=dict[int, _Request])


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
        for name in preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise SpecError("preload", name, "name importable modules, such as 'torch'")
        if start_timeout <= 0:
            raise SpecError("start_timeout", start_timeout, "give a positive number of seconds")
        self._hub = hub
        self._owner = os.getpid()
        self._preload = tuple(preload)
        self._start_timeout = start_timeout
        self._mark = TreeMark.new(dict(os.environ))
        self._emit = emit
        self._guardian = Guardian(hub, self._mark, emit)
        self._memory = OomEvidence()
        self._numbers = itertools.count(1)
        self._condition = threading.Condition()
        self._boot: _Boot | None = None
        self._unfit = ""
        self._processes: set[Process] = set()
        self._reaping: dict[int, Reaping] = {}
        self._closed = False

    def warm(self) -> None:
        """Boot the zygote now, without waiting for it."""
        self._check()
        self._guardian.start()
        with self._condition:
            if self._boot is None and not self._unfit:
                self._start_zygote()

    def launch(
        self, spec: LaunchSpec, *, on_exit: Callable[[Process], None], deadline: float
    ) -> Process:
        """Start one process; return once it runs.

        Args:
            spec: What to start.
            on_exit: Called once with the process when it has ended, on the hub's thread; maybe
                before this returns.
            deadline: On the monotonic clock.

        Raises:
            SpecError: a module of the preload does not import, or the spec names what is not there.
            RuntimeFault: the machine would not start it, or not in time. Nothing is left of it.
        """
        return self.launch_many([spec], on_exit=on_exit, deadline=deadline)[0]

    def launch_many(
        self,
        specs: Iterable[LaunchSpec],
        *,
        on_exit: Callable[[Process], None],
        deadline: float,
    ) -> list[Process]:
        """Start all of *specs* or, where one fails, none of them; see `launch`."""
        self._check()
        if self._hub.is_current():
            msg = "launching from the hub's own thread, which launching waits for"
            raise WouldDeadlock(msg)
        self._guardian.start()
        memory = self._memory.sample()
        requests: list[_Request] = []
        try:
            for spec in specs:
                requests.append(self._request(spec))  # noqa: PERF401  # what exists is closed
            forked = [request for request in requests if request.spec.method == "zygote"]
            if forked and not self._fork(forked, deadline):
                forked = []
            self._exec([request for request in requests if request not in forked], deadline)
            return self._let_go(requests, on_exit, memory)
        finally:
            for request in requests:
                request.close()
                if request.pidfd >= 0:  # nobody's process now: the launch has failed
                    self._discard(request)

    def on_driver_death_remove(self, path: str) -> None:
        """Have the file or folder *path* removed when this process dies without removing it."""
        self._check()
        self._guardian.start()
        self._guardian.add_path(path)

    def forget_path(self, path: str) -> None:
        """The path is removed, or shall stay."""
        self._guardian.drop_path(path)

    def close(self, deadline: float) -> None:
        """End everything that was started here, daemons included, and the helpers.

        Raises:
            RuntimeFault: something was still there at *deadline* (monotonic); it names it.
        """
        if self._owner != os.getpid():
            return
        with self._condition:
            if self._closed:
                return
            self._closed = True
            boot, self._boot = self._boot, None
            self._condition.notify_all()
        if boot is not None:
            boot.zygote.close(deadline)
        processes = list(self._processes)
        left: tuple[tree.Hunted, ...] = ()
        if self._guardian.pid:
            sessions = [process.key for process in processes]
            left = tree.kill(tree.Quarry(self._mark.needle, sessions, sessions), deadline).left
        for process in processes:
            process.wait(deadline)
            process.close()
        with self._condition:
            reaping = list(self._reaping.values())
        for one in reaping:
            one.close()
        self._guardian.close(deadline)
        if left:
            names = ", ".join(f"{one.pid} ({one.command})" for one in left)
            msg = f"processes withstood being killed: {names}"
            raise RuntimeFault(msg)

    # --- one launch, in the caller's thread -----------------------------------------------

    def _request(self, spec: LaunchSpec) -> _Request:
        number = next(self._numbers)
        mark = self._mark.of(number, spec.label)
        file = ledger.own(spec.birth(mark).to_file())
        awaits, go = _pipe()
        return _Request(number, spec, mark, file, go, awaits)

    def _fork(self, requests: list[_Request], deadline: float) -> bool:
        """Have the zygote fork all of *requests*; return False where it must not fork."""
        for _ in range(_ATTEMPTS):
            boot = self._ready_zygote(deadline)
            if boot is None:
                return False
            subreaper.open_window()
            try:
                if self._ask(boot, requests, deadline):
                    return True
            finally:
                with self._condition:
                    for request in requests:
                        boot.waiting.pop(request.number, None)
                if subreaper.close_window():
                    self._reap_adopted()
            for request in requests:
                # It has not been told to go, so it is as if it had never been.
                self._discard(request)
            if self._unfit:
                return False
        msg = f"the zygote died {_ATTEMPTS} times during one launch; see its stderr"
        raise RuntimeFault(msg)

    def _ask(self, boot: _Boot, requests: list[_Request], deadline: float) -> bool:
        """Return True when all of *requests* are our children, False where the zygote is gone."""
        with self._condition:
            boot.waiting.update({request.number: request for request in requests})
        for request in requests:
            fds = [request.file, request.awaits, *_outputs(request.spec)]
            try:
                boot.zygote.request(request.number, [*fds, *request.spec.fds.values()], deadline)
            except TimeoutError:
                break
            except OSError as error:
                _raise_for_fds(request.spec, error)
                break  # the zygote is gone; word of it is on its way
        with self._condition:
            while not all(request.state == "parted" for request in requests):
                problem = next((r.problem for r in requests if r.problem), "")
                if problem:
                    msg = f"could not start {requests[0].spec.label!r}: {problem}"
                    raise RuntimeFault(msg)
                if boot.is_gone or self._unfit:
                    return False
                self._wait(deadline, requests[0].spec.label)
        return True

    def _ready_zygote(self, deadline: float) -> _Boot | None:
        """Return a zygote that forks; None where none may be used here."""
        with self._condition:
            if self._unfit:
                return None
            boot = self._boot or self._start_zygote()
            limit = boot.zygote.started_at + self._start_timeout
            while not boot.is_ready and boot.error is None:
                if time.monotonic() >= limit:
                    boot.zygote.kill()
                    msg = (
                        f"the zygote had not imported {', '.join(self._preload) or 'phalanx'} "
                        f"after {self._start_timeout:.3g} s; raise start_timeout"
                    )
                    raise RuntimeFault(msg)
                self._wait(min(deadline, limit), "the zygote", late=deadline < limit)
            if boot.error is not None:
                raise boot.error()
            return None if self._unfit else boot

    def _exec(self, requests: list[_Request], deadline: float) -> None:
        """Start all of *requests* as new interpreters."""
        for request in requests:
            # From the hub's thread, because the parent-death signal follows the thread that
            # started a process, not its process: the caller's thread may end any time.
            done = threading.Event()
            outcome: list[Exception] = []

            def start(
                request: _Request = request,
                done: threading.Event = done,
                outcome: list[Exception] = outcome,
            ) -> None:
                try:
                    pid = start_interpreter(
                        request.spec, request.mark, request.file, request.awaits
                    )
                    request.pid, request.pidfd = pid, ledger.own(os.pidfd_open(pid))
                    request.state = "parted"
                except Exception as error:  # noqa: BLE001  # raised in the caller's thread
                    outcome.append(error)
                finally:
                    done.set()

            self._hub.post(start)
            # Not until the deadline only: the hub's thread is using the request's descriptors.
            done.wait()
            if outcome:
                raise outcome[0]
            if time.monotonic() > deadline:
                msg = f"could not start {request.spec.label!r} before the deadline"
                raise RuntimeFault(msg)

    def _let_go(
        self, requests: list[_Request], on_exit: Callable[[Process], None], memory: OomSample
    ) -> list[Process]:
        processes: list[Process] = []
        for request in requests:
            task = tree.read(request.pid)
            if task is None:
                # Only with SIGCHLD ignored, or somebody waiting for any child, and a death
                # before its first instruction.
                task = tree.Task(request.pid, self._owner, request.pid, "X", 0)
            pidfd, request.pidfd = request.pidfd, -1
            key = [task.key]
            process = Process(
                self._hub,
                ledger.disown(pidfd),
                task,
                label=request.spec.label,
                quarry=tree.Quarry(
                    request.mark.needle, key, key if request.spec.new_session else ()
                ),
                memory=self._memory,
                memory_before=memory,
                on_exit=on_exit,
                on_close=self._on_process_closed,
            )
            with self._condition:
                self._processes.add(process)
                closed = self._closed
            self._guardian.add_session(process.key)
            processes.append(process)
            if closed:
                process.send_signal(signal.SIGKILL)
        for request in requests:
            with contextlib.suppress(BrokenPipeError):  # dead already: its death will be told
                os.write(request.go, b"g")
        return processes

    def _wait(self, deadline: float, label: str, *, late: bool = True) -> None:
        """Wait for news until *deadline*; the condition is held."""
        if self._closed:
            msg = "the launcher was closed"
            raise RuntimeFault(msg)
        if not self._condition.wait(max(0.0, deadline - time.monotonic())) and late:
            msg = f"could not start {label!r} before the deadline"
            raise RuntimeFault(msg)

    def _check(self) -> None:
        if self._owner != os.getpid():
            msg = "this launcher belongs to the parent process; make another after the fork"
            raise RuntimeFault(msg)
        if self._closed:
            msg = "the launcher is closed"
            raise RuntimeFault(msg)

    # --- the zygote, on the hub's thread --------------------------------------------------

    def _start_zygote(self) -> _Boot:
        zygote = Zygote(
            self._hub,
            self._mark,
            self._preload,
            on_message=self._on_message,
            on_exit=self._on_zygote_exit,
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
                    if requests:
                        requests[0].state = "born"
                        requests[0].pid = said.pid
                        requests[0].pidfd = ledger.own(said.pidfd)
                        subreaper.claim(said.pid)
                    else:
                        self._reap(said.pidfd, said.pid, kill=True)
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

    def _on_zygote_exit(self, zygote: Zygote, how: str) -> None:
        with self._condition:
            boot = self._boot
            if boot is None or boot.zygote is not zygote:
                return
            boot.is_gone = True
            self._boot = None
            names = ", ".join(self._preload) or "phalanx"
            if not boot.is_ready and boot.error is None:
                msg = f"the zygote ended while it imported {names}: {how}"
                boot.error = lambda: RuntimeFault(msg)
            self._condition.notify_all()
            if not boot.is_ready or self._unfit or self._closed:
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

    # --- what is left of starts -----------------------------------------------------------

    def _discard(self, request: _Request) -> None:
        """Kill what came of *request* and was not let go."""
        if request.pidfd >= 0:
            pidfd, request.pidfd = request.pidfd, -1
            self._reap(ledger.disown(pidfd), request.pid, kill=True)
        request.state = "asked"
        if request.go >= 0:
            # Another pipe for the next attempt: the dying process could still take our word.
            ledger.close(request.go)
            ledger.close(request.awaits)
            request.awaits, request.go = _pipe()

    def _reap_adopted(self) -> None:
        for task in subreaper.adopted():
            try:
                pidfd = os.pidfd_open(task.pid)
            except OSError:
                continue
            now = tree.read(task.pid)
            if now is None or now.key != task.key:
                os.close(pidfd)
                continue
            self._reap(pidfd, task.pid, kill=False)

    def _reap(self, pidfd: int, pid: int, *, kill: bool) -> None:
        """Collect a process that nobody waits for once it has ended."""
        if kill:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with self._condition:
            if self._closed or pid in self._reaping:
                os.close(pidfd)
                return
            self._reaping[pid] = Reaping(
                self._hub, pidfd, pid, lambda: self._reaping.pop(pid, None)
            )

    def _on_process_closed(self, process: Process) -> None:
        with self._condition:
            self._processes.discard(process)
        self._guardian.drop_session(process.key)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    return ledger.own(read), ledger.own(write)


def _outputs(spec: LaunchSpec) -> tuple[int, int]:
    """Return the descriptors of *spec*'s output; a closed one of the driver's stays closed."""
    return (
        1 if spec.stdout is None else spec.stdout,
        2 if spec.stderr is None else spec.stderr,
    )


def _raise_for_fds(spec: LaunchSpec, error: OSError) -> None:
    """Raise where *error* came from a descriptor that is not open."""
    for name, fd in {**spec.fds, "stdout": _outputs(spec)[0], "stderr": _outputs(spec)[1]}.items():
        try:
            os.fstat(fd)
        except OSError:
            raise SpecError(f"fds[{name!r}]", fd, "pass an open descriptor") from error


def _import_error(said: ZygoteSaid) -> SpecError:
    last = said.text.strip().rpartition("\n")[2]
    error = SpecError("preload", said.module, f"it does not import in the zygote: {last}")
    error.add_note(said.text)
    return error
