"""Control socket of a worker, and the thread that answers probes of liveness.

A worker's birth, and its way back to its driver beside the answers to calls.

Guarantees: what is told is sent before `Link.tell` returns; it may be told from any thread.

Left to others: the answers to calls (`replies`), and the pulse's own thread (`pulse`).

A worker's heartbeat from outside its main loop: one thread that answers when it is asked.

Guarantees: whatever the main thread does, an interpreter that can run at all answers within its
switch interval, and says where the main thread is. At rest the thread sleeps in the kernel: a
heartbeat that nobody asked for would cost every worker a little, always. Signals are left to the
main thread, but for the one that asks for stacks: so those of a worker whose main thread blocks
signals, or is in the kernel where none reaches it, are still to be had.

Left to others: asking, and what silence means (`health`). No answer is no proof of a hang: native
code that holds the interpreter lock keeps this thread waiting too, and may be busy.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from phalanx.runtime.distributed.gloo import end_gloo_connections, open_gloo_connections
from phalanx.runtime.observe.diagnostics import STACKS
from phalanx.runtime.wire.codec import encode
from phalanx.runtime.wire.frame import Frame, receive, send
from phalanx.runtime.wire.message import Payload
from phalanx.runtime.wire.protocol import Kind

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from .host import Hosted
    from .termination import Termination


_DEPTH: Final = 64
_OWN_FAULTS: Final = (
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
    *(signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
)


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a worker's heartbeat says.

    Attributes:
        where: The calls its main thread is in, innermost first, as ``function (file:line)``.
        connections: How many connections gloo has open, where that thread is in a collective
            operation; None elsewhere, and where it is not known.
        epoch: The one whose process group it is in, or is about to join.
    """

    where: tuple[str, ...] = ()
    connections: int | None = None
    epoch: int = 0

    @property
    def is_in_collective(self) -> bool:
        """Whether the main thread is in a collective operation of `torch.distributed`."""
        return any("/torch/distributed/" in each for each in self.where)

    def __str__(self) -> str:
        return self.where[0] if self.where else "no Python code"


def keep_pulse(
    control: socket.socket,
    answer: Callable[[int, Pulse], None],
    part: Callable[[int], None],
    other: Callable[[Frame | None], None],
) -> None:
    """Answer every question that comes through *control* from now on, on a thread of its own.

    Args:
        control: Read by nobody else from now on.
        answer: Sends the answer to the question of that number.
        part: Frees the main thread from what it waits for in a group that is to be left for that
            epoch.
        other: Given every other message, and None at the end.
    """
    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(
        target=_keep, args=(control, answer, part, other, main), name="phalanx-pulse", daemon=True
    )
    thread.start()


def _keep(
    control: socket.socket,
    answer: Callable[[int, Pulse], None],
    part: Callable[[int], None],
    other: Callable[[Frame | None], None],
    main: int,
) -> None:
    others = signal.valid_signals() - {STACKS, *_OWN_FAULTS}
    signal.pthread_sigmask(signal.SIG_SETMASK, others)
    try:
        while not isinstance(frame := receive(control), bytes):
            if frame is None:
                continue  # none of ours
            if frame.kind == Kind.ASK:
                answer(frame.call_id, _pulse(main))
            elif frame.kind == Kind.PART:
                part(frame.epoch)
            else:
                other(frame)
    except OSError:  # the user closed our descriptors: the end is near, and not ours to bring
        pass
    other(None)  # the driver is gone, or has let go of us


def _pulse(main: int) -> Pulse:
    pulse = Pulse(_where(main))
    return replace(pulse, connections=open_gloo_connections()) if pulse.is_in_collective else pulse


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


@dataclass(frozen=True, slots=True)
class Boot:
    """What a worker is told at its birth; pickled by name.

    Attributes:
        host: Given *blob* and a `Link`, returns what to host. Importable by name.
        blob: What the layer above sends to itself.
    """

    rank: int
    incarnation: int
    epoch: int
    host: Callable[[bytes, Link], Hosted]
    blob: bytes


@dataclass(slots=True)
class Link:
    """A worker's way back to its driver, beside the answers to calls.

    Attributes:
        pid: Of the process that was started; a copy that it forks is another, and may not answer.
    """

    control: socket.socket
    rank: int
    incarnation: int
    epoch: int
    fds: Mapping[str, int] = field(default_factory=dict[str, int])
    pid: int = field(default_factory=os.getpid)
    _told: queue.SimpleQueue[Frame | None] = field(
        default_factory=queue.SimpleQueue["Frame | None"]
    )
    _entering: threading.Lock = field(default_factory=threading.Lock)

    def keep_pulse(self, termination: Termination) -> None:
        """Answer the driver beside the main loop from now on; what else it says, `receive` has."""

        def answer(number: int, pulse: Pulse) -> None:
            self.tell(Kind.PULSE, replace(pulse, epoch=self.epoch), number=number)

        def hear(frame: Frame | None) -> None:
            if frame is None or frame.kind in (Kind.DRAINING, Kind.TERMINATE):
                termination.hear(None if frame is None else frame.kind)
            if frame is None or frame.kind not in (Kind.DRAINING, Kind.TERMINATE):
                self._told.put(frame)

        keep_pulse(self.control, answer, self._part, hear)
        termination.listen()

    def enter(self, epoch: int) -> None:
        """Note that the worker leaves its process group for that of *epoch*."""
        with self._entering:
            self.epoch = epoch

    def _part(self, epoch: int) -> None:
        """End the connections of the process group that is to be left, unless it is left already.

        Those that would be ended then are of the next one.
        """
        with self._entering:
            if self.epoch < epoch:
                end_gloo_connections()

    def receive(self) -> Frame | None:
        """Return what the driver says outside of any call, or None at the end; waits for it."""
        return self._told.get()

    def tell(self, kind: int, value: object = None, *, number: int = 0) -> None:
        """Send *value* to the driver, outside of any call; *number* is what it answers to."""
        payload = Payload.of(None if value is None else encode(value, "the event"))
        try:
            packet = payload.packet(
                kind, epoch=self.epoch, call_id=number, incarnation=self.incarnation
            )
            send(self.control, packet, payload.file)
        finally:
            payload.close()
