"""Control socket of a worker: messages beside replies, liveness probes, a standby's assignment.

One thread reads the socket and answers probes, whatever the main thread does: an interpreter that
can run at all answers within its switch interval and reports the main thread's stack. At rest it
sleeps in the kernel. Signals are left to the main thread, except the one that requests stacks: so
a worker whose main thread blocks signals, or is in the kernel, can still write them. No answer is
no proof of a hang: native code that holds the interpreter lock also stops this thread.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import queue
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from phalanx.runtime.distributed.abort import abort_process_groups, void_process_groups
from phalanx.runtime.linux import process_title
from phalanx.runtime.observe.diagnostics import STACKS
from phalanx.runtime.wire.codec import encode
from phalanx.runtime.wire.packet_decoder import Frame, receive, send
from phalanx.runtime.wire.packet_encoder import Payload
from phalanx.runtime.wire.packet_header import Kind
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from phalanx.supervision import Directive, ExitReason

    from .termination import Termination
    from .tracing import ServerSpan


_DEPTH: Final = 64
_WIPE_ON_FORK: Final = 18  # not in `mmap`
_RELEASE: Final = 0.25  # seconds for the main thread to get the errors of ended connections
_NCCL_RELEASE: Final = 2.0  # the same after an abort of NCCL; arbitrary
_WAITS: Final = re.compile("/torch/(distributed|autograd)/")  # a backward pass waits for DDP's
_NCCL: Final = re.compile(r"/torch/distributed/\w+\.py:")  # not those that compute, or write files
_OWN_FAULTS: Final = (
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
)


def _mark_original() -> mmap.mmap:
    """Return memory whose first byte is 1 in this process, and 0 in each copy of it.

    Source: MADV_WIPEONFORK of ``madvise(2)``.
    """
    mark = mmap.mmap(-1, 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mark[0] = 1
    os.register_at_fork(after_in_child=functools.partial(mark.__setitem__, 0, 0))
    with contextlib.suppress(OSError):  # an old kernel: only forks by Python are found
        mark.madvise(_WIPE_ON_FORK)
    return mark


@dataclass(frozen=True, slots=True)
class Pulse:
    """The answer to a liveness probe.

    Attributes:
        where: The calls its main thread is in, innermost first, as ``function (file:line)``.
    """

    where: tuple[str, ...] = ()

    @property
    def is_in_collective(self) -> bool:
        """Whether the main thread is in a collective operation of `torch.distributed`."""
        return any("/torch/distributed/" in each for each in self.where)

    def __str__(self) -> str:
        return self.where[0] if self.where else "no Python code"


def _where(thread: int) -> tuple[str, ...]:
    """Return the calls that *thread* is in.

    No frame may outlive this: it would keep alive what its function held, a process group included,
    for which the other ranks wait. So the table of frames gets no name: it has this one in it too,
    which would hold the table in turn.
    """
    frame = sys._current_frames().get(thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # there is no other way
    found: list[str] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        found.append(f"{code.co_name} ({code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return tuple(found)


def _main_thread() -> tuple[str, ...]:
    """Return the state of the main thread, and how often it has slept and been interrupted."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return tuple(line for line in lines if line.startswith("State") or "ctxt" in line)


def _waits_for_gloo(main: int) -> bool:
    """Whether thread *main* sleeps on in an operation of gloo, or in a backward pass."""
    before = _main_thread()
    time.sleep(_RELEASE)
    stays = before == _main_thread() and "S (sleeping)" in before[0]
    return stays and any(map(_WAITS.search, _where(main)))


def _waits_for_nccl(main: int) -> bool:
    """Whether thread *main* stays at one place in `torch.distributed`.

    It need not sleep there: it may look again and again. What merely runs below a function of
    torch, such as the rest of a backward pass, ends by itself.
    """
    before = _where(main)
    time.sleep(_NCCL_RELEASE)
    return bool(before) and bool(_NCCL.search(before[0])) and before == _where(main)


class ResultsUndefined(RuntimeFault):
    """The answer of a call whose NCCL process group was aborted; no decider is called for it."""


class Hosted(Protocol):
    """The callbacks that the layer above provides inside a worker process.

    Every method is called on the worker's main thread.
    """

    @property
    def after_reply(self) -> Callable[[], None] | None:
        """Called after each answer; None for nothing."""
        ...

    def start(self) -> None:
        """Build the user's object and run its start hook."""
        ...

    def invoke(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call."""
        ...

    def span(self, method: Any, carrier: Mapping[str, str]) -> ServerSpan:
        """Begin the span of a call of *method* below that of *carrier*."""
        ...

    def end_copy(self) -> None:
        """End this process if it is a forked copy of the worker, which has left the user's code."""
        ...

    def adopt(self, epoch: int) -> None:
        """Note that the group around this worker has a new epoch."""
        ...

    def reform(self, order: Any) -> None:
        """Leave the process group of the last epoch and join that of the new one."""
        ...

    def save(self, call_id: int) -> Payload:
        """Store the user's state after *call_id*; return the message for the driver."""
        ...

    def stop(self, reason: ExitReason) -> None:
        """Run the user's stop hook."""
        ...

    def judge(self, error: BaseException) -> Directive:
        """Return the decider's directive for *error*, which a method raised."""
        ...

    def note_foreign_packet(self) -> None:
        """Log that the call socket received a malformed packet."""
        ...

    def fail(self, error: BaseException) -> None:
        """Run the user's failure hook: *error* is about to end this worker."""
        ...


@dataclass(frozen=True, slots=True)
class Boot:
    """Boot record of a worker; pickled by name.

    Attributes:
        host: Given *blob* and a `Link`, returns the host. Importable by name.
        blob: A message of the layer above to itself.
    """

    rank: int
    incarnation: int
    epoch: int
    host: Callable[[bytes, Link], Hosted]
    blob: bytes


@dataclass(slots=True)
class Link:
    """A worker's end of the control socket.

    Attributes:
        original: Byte 0 is 1 in the process that was started, and 0 in a copy that it forks, which
            may not answer. Read for each call: `os.getpid` would be a system call.
        aborts: How often the NCCL groups of this process were void: aborted, or about to be.
        entered_at: How often when it entered the present epoch.
    """

    control: socket.socket
    rank: int
    incarnation: int
    epoch: int
    fds: Mapping[str, int] = field(default_factory=dict[str, int])
    original: mmap.mmap = field(default_factory=_mark_original)
    aborts: int = 0
    entered_at: int = 0
    _received: queue.SimpleQueue[Frame | None] = field(
        default_factory=queue.SimpleQueue["Frame | None"]
    )
    _entering: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, termination: Termination) -> None:
        """Read the control socket from now on, on a thread of its own."""
        main = threading.main_thread().ident
        assert main is not None
        threading.Thread(
            target=self._serve, args=(termination, main), name="phalanx-control", daemon=True
        ).start()
        termination.listen()

    def enter(self, epoch: int) -> None:
        """Note that the worker leaves its process group for that of *epoch*.

        To leave a group of NCCL is to abort it, under what the output thread may still compute.
        """
        with self._entering:
            self.epoch = epoch
            self.aborts += void_process_groups()
            self.entered_at = self.aborts

    def check_results(self, entered_at: int | None = None) -> None:
        """Raise if results are undefined, for an NCCL group was aborted before they were there.

        *entered_at* is that of the epoch in which they were begun; None for the present one.
        """
        if self.aborts != (self.entered_at if entered_at is None else entered_at):
            raise ResultsUndefined(
                "its NCCL process group was aborted during the call: its results are undefined"
            )

    def receive(self) -> Frame | None:
        """Return the next message that is neither a probe nor about termination; None at the end.

        Waits for it.
        """
        return self._received.get()

    def tell(
        self, kind: int, value: object = None, *, number: int = 0, epoch: int | None = None
    ) -> None:
        """Send *value* to the driver, from any thread; *number* is the probe it answers.

        *epoch* is the one it is about; None for the present one.
        """
        payload = Payload.of(None if value is None else encode(value, "the event"))
        try:
            packet = payload.packet(
                kind,
                epoch=self.epoch if epoch is None else epoch,
                call_id=number,
                incarnation=self.incarnation,
            )
            send(self.control, packet, payload.file)
        finally:
            payload.close()

    def _serve(self, termination: Termination, main: int) -> None:
        others = signal.valid_signals() - {STACKS, *_OWN_FAULTS}
        signal.pthread_sigmask(signal.SIG_SETMASK, others)
        try:
            while not isinstance(frame := receive(self.control), bytes):
                if frame is None:
                    continue  # no message of ours
                match frame.kind:
                    case Kind.ASK:
                        self.tell(Kind.PULSE, Pulse(_where(main)), number=frame.call_id)
                    case Kind.VOID:
                        self._spawn(self._void, frame.epoch)
                    case Kind.PART:
                        self._spawn(self._part, frame.epoch, main)
                    case Kind.DRAINING | Kind.TERMINATE:
                        termination.on_message(frame.kind)
                    case _:
                        self._received.put(frame)
        except OSError:  # the user closed our descriptors
            pass
        termination.on_message(None)  # the driver is gone, or has closed its end
        self._received.put(None)

    def _spawn(self, what: Callable[..., None], *args: int) -> None:
        """Run *what* on a thread; without one, `leave_within` holds."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=what, args=args, daemon=True).start()

    def _void(self, epoch: int) -> None:
        """Note that what is being computed is void, before any rank is aborted; say so."""
        with self._entering:
            if self.epoch < epoch:
                self.aborts += void_process_groups()
        with contextlib.suppress(OSError):  # the driver is gone
            self.tell(Kind.VOIDED, epoch=epoch)

    def _part(self, epoch: int, main: int) -> None:
        """End the connections of the process group that the worker is to leave for *epoch*.

        Not if it has left it: then they are those of the next one. If it still waits for one of
        them then, nothing ends that wait.
        """
        with self._entering:
            if self.epoch >= epoch:
                return
            is_nccl = void_process_groups()
            self.aborts += is_nccl
            try:
                abort_process_groups()
            except RuntimeFault as fault:
                self._cannot_leave(fault, epoch)
                return
        waits = _waits_for_nccl if is_nccl else _waits_for_gloo
        if waits(main) and self.epoch < epoch:
            why = "it waits in an aborted process group and gets no error"
            if not is_nccl:
                why += ": it is in the middle of a message of gloo"
            self._cannot_leave(RuntimeFault(why), epoch)

    def _cannot_leave(self, fault: RuntimeFault, epoch: int) -> None:
        with contextlib.suppress(OSError):  # the driver is gone
            self.tell(Kind.NOT_REFORMED, RemoteFailure.of(fault), epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The rank that a spare takes.

    Attributes:
        env: The complete environment, but for the tag of the tree.
        cwd: None leaves it where it is.
    """

    rank: int
    incarnation: int
    epoch: int
    blob: bytes
    env: Mapping[str, str]
    cwd: str | None
    title: str


def await_assignment(link: Link) -> Assignment:
    """Report that this standby is warm, wait for its assignment, adopt it and return it.

    Environment, working directory and title are those of a process started for that rank now.
    """
    link.tell(Kind.STANDBY)
    while True:
        frame = receive(link.control)
        if isinstance(frame, bytes):
            sys.exit(0)  # the driver has gone, or does not need this process
        if isinstance(frame, Frame) and frame.kind == Kind.ASSIGN:
            break
    assignment: Assignment = frame.value()
    link.rank = assignment.rank
    link.incarnation = assignment.incarnation
    link.epoch = assignment.epoch
    process_title.adopt(assignment.env, assignment.cwd, assignment.title)
    return assignment
