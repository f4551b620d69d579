"""The child's side: one worker process, from its first line to its exit.

Guarantees: the driver hears READY or the exception of the start; calls are served one at a time,
in order; a call withdrawn before it began is never begun; an exception of a method is that call's
answer and not the end of the worker; SIGTERM and SIGINT end the worker once, with its `on_stop`
run, also in the middle of a call; whatever ends it, its exit status tells.

Left to others: the process around it (`launcher`), the user's class (`Hosted`, from the layer
above).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.supervision import Directive, ExitKind, ExitReason, RuntimeFault

from .arena import ARENA_IDLE, ARENA_LONGEST
from .arena_exchange import WorkerExchange
from .board import Board, register_worker
from .codec import encode
from .doom import Doom
from .frames import Flag, Frame, Kind, Payload, receive, send
from .last_words import install_last_words
from .pulse import Pulse, keep_pulse
from .remote_failure import RemoteFailure
from .replies import ReplyLine
from .stacks import install_stacks
from .streams import Inbox, send_items

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from .telemetry import ServerSpan


class Hosted(Protocol):
    """What the layer above puts into a worker process."""

    @property
    def after_reply(self) -> Callable[[], None] | None:
        """What is to be called when a call has been answered; None for nothing."""
        ...

    def start(self) -> None:
        """Build the user's object and run its start hook."""
        ...

    def invoke(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call."""
        ...

    def span(self, method: Any, carrier: Mapping[str, str]) -> ServerSpan:
        """Begin the span of a call of *method*, whose caller *carrier* names."""
        ...

    def adopt(self, epoch: int) -> None:
        """Note that the group around this worker has a new epoch."""
        ...

    def reform(self, order: Any) -> None:
        """Leave the process group of the last epoch and join that of the new one."""
        ...

    def save(self, call_id: int) -> Payload:
        """Store the user's state as it is after *call_id*; return what the driver is told."""
        ...

    def stop(self, reason: ExitReason) -> None:
        """Run the user's stop hook."""
        ...

    def judge(self, error: BaseException) -> Directive:
        """Return what becomes of this worker, whose method raised *error*."""
        ...

    def note_foreign(self) -> None:
        """Log that the driver's socket brought what was none of its messages."""
        ...

    def fail(self, error: BaseException) -> None:
        """Run the user's failure hook: *error* is about to end this worker."""
        ...


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
    """A worker's way back to its driver, beside the answers to calls."""

    control: socket.socket
    rank: int
    incarnation: int
    epoch: int
    fds: Mapping[str, int] = field(default_factory=dict[str, int])
    _told: queue.SimpleQueue[Frame | None] = field(
        default_factory=queue.SimpleQueue["Frame | None"]
    )

    def keep_pulse(self) -> None:
        """Answer the driver beside the main loop from now on; what else it says, `receive` has."""

        def answer(number: int, pulse: Pulse) -> None:
            self.tell(Kind.PULSE, pulse, number=number)

        keep_pulse(self.control, answer, self._told.put)

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


class Terminated(BaseException):
    """SIGTERM or SIGINT, raised where the main thread happens to be."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Run one worker; return its exit code."""
    control = socket.socket(fileno=fds["control"])
    data = socket.socket(fileno=fds["data"])
    board = Board(fds["board"])
    boot: Boot = pickle.loads(payload)
    link = Link(control, boot.rank, boot.incarnation, boot.epoch, fds)
    register_worker()
    install_last_words(fds["faults"])
    install_stacks(fds["faults"])
    _arm_signals()
    try:
        try:
            _limit_threads()
            hosted = boot.host(boot.blob, link)
            _limit_threads()  # a spare has been given the environment of its rank meanwhile
            link.keep_pulse()
            hosted.start()
        except Terminated:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit in a start is a failed start
            link.tell(Kind.START_FAILED, RemoteFailure.of(error))
            return _start_exit_code(error)
        _greet(data, link)
        exchange = WorkerExchange.inherit(fds)
        doom = Doom(link, hosted)
        replies = ReplyLine(data, exchange, link.rank, link.incarnation, doom=doom)
        worker = _Worker(
            data,
            link,
            board=board,
            hosted=hosted,
            replies=replies,
            exchange=exchange,
            doom=doom,
        )
        return worker.run()
    except Terminated as end:
        _die_of(end.number)
        return 128 + end.number


class _Worker:
    def __init__(
        self,
        data: socket.socket,
        link: Link,
        *,
        board: Board,
        hosted: Hosted,
        replies: ReplyLine,
        exchange: WorkerExchange,
        doom: Doom,
    ) -> None:
        self._link = link
        self._doom = doom
        self._board = board
        self._hosted = hosted
        self._replies = replies
        self._arena = exchange.arena
        self._after_reply = hosted.after_reply
        self._inbox = Inbox(data, exchange.reader, hosted.note_foreign)

    def run(self) -> int:
        """Serve until told to stop; return the exit code."""
        hosted = self._hosted
        try:
            self._serve()
            self._replies.close()
        except Terminated as end:
            name = signal.Signals(end.number).name
            self._stop(ExitReason(ExitKind.SHUTDOWN, name, signal=end.number))
            raise
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
            self._stop(ExitReason(ExitKind.CRASH if code else ExitKind.NORMAL, code=code))
            return code & 0xFF
        except BaseException as error:
            self._link.tell(Kind.LAST_WORDS, RemoteFailure.of(error))
            hosted.fail(error)
            raise
        self._stop(ExitReason(ExitKind.SHUTDOWN))
        return 0

    def _stop(self, reason: ExitReason) -> None:
        # A second signal must not cut the stop hook short: the driver has a deadline for that.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Before the others see its connections close, which is long before the process has ended.
        with contextlib.suppress(OSError):
            self._link.tell(Kind.ENDING)
        self._hosted.stop(reason)

    def _serve(self) -> None:
        inbox = self._inbox
        arena = self._arena
        board = self._board
        while True:
            # Not while an answer is being computed: that needs the interpreter.
            if (spin := board.spin) and not self._replies.is_behind:
                inbox.look(spin)
            if arena.is_warm:
                self._trim_when_idle()
            frame = inbox.take()
            if self._doom.is_sealed:
                self._doom.await_end()
            if frame is None or frame.kind == Kind.STOP:
                return  # without a frame the driver is gone, or has only closed the group
            if frame.kind == Kind.CALL:
                self._call(frame)
            elif frame.kind == Kind.REFORM:
                self._reform(frame)

    def _trim_when_idle(self) -> None:
        """Give idle memory back while no message comes; return when one is there."""
        wait = ARENA_IDLE
        while self._arena.is_warm and self._inbox.is_quiet(wait):
            self._arena.trim()
            wait = min(2 * wait, ARENA_LONGEST)  # the driver keeps what is left: look less often

    def _reform(self, frame: Frame) -> None:
        link = self._link
        link.epoch = frame.epoch
        try:
            self._hosted.reform(frame.value())
        except Exception as error:  # noqa: BLE001  # maybe another rank died; the driver knows
            link.tell(Kind.NOT_REFORMED, RemoteFailure.of(error))
        else:
            link.tell(Kind.READY)

    def _call(self, frame: Frame) -> None:
        call_id = frame.call_id
        board = self._board
        now = board.begin(call_id)
        sent_in = frame.incarnation
        if sent_in != now and board.is_void(
            call_id, sent_in, now, collective=bool(frame.flags & Flag.COLLECTIVE)
        ):
            board.finish(call_id, served=False)
            frame.drop()
            self._inbox.forget(call_id)
            self._replies.skip(frame)
            return
        if frame.epoch > self._link.epoch:  # a call for this rank alone may be from before
            self._link.epoch = frame.epoch
            self._hosted.adopt(frame.epoch)
        span: ServerSpan | None = None
        try:
            method, args, kwargs, *carrier = frame.value()
            if carrier:
                span = self._hosted.span(method, carrier[0])
            result = self._hosted.invoke(method, args, kwargs)
            # Before the answer: so the driver finds the arguments' memory free for its next call.
            del args, kwargs
            if frame.flags & Flag.STREAM:
                send_items(frame, result, self._inbox, self._replies, board)
                result = None
            if span is not None:
                result = span.returned(result)
        except (Terminated, SystemExit) as end:
            if span is not None:
                span.raised(end)
            raise
        except BaseException as error:  # noqa: BLE001  # the caller's to judge; asyncio's too
            if span is not None:
                span.raised(error)
            # The state behind an error for which the worker ends is none to go on from.
            if frame.flags & Flag.MARKED and self._hosted.judge(error) is Directive.RESUME:
                self._save(frame)
            self._replies.refuse(frame, error)
        else:
            spoilt = self._save(frame) if frame.flags & Flag.MARKED else None
            self._replies.answer(frame, result)
            if spoilt is not None:
                self._doom.carry_out(self._doom.weigh(spoilt), spoilt)
        if self._after_reply is not None:
            self._after_reply()
        board.finish(call_id)
        if frame.flags & Flag.PACED and self._replies.is_behind:
            self._replies.pass_by(frame)

    def _save(self, call: Frame) -> BaseException | None:
        """Store the state: first, so that whatever is answered has been stored. Return an error."""
        self._board.save(call.call_id)
        if call.flags & Flag.PACED:
            self._replies.tell_saving(call)
        try:
            saved = self._hosted.save(call.call_id)
        except (Terminated, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # the call goes on; the driver is told
            failure = encode(RemoteFailure.of(error), "the error")
            self._replies.note(call, Kind.NOT_SAVED, Payload.of(failure))
            return error
        self._replies.note(call, Kind.SAVED, saved)
        return None


def _greet(data: socket.socket, link: Link) -> None:
    """Prove both directions of the call socket, then say READY.

    The driver put a greeting into the socket before this process existed; the answer lies there
    before the driver hears READY on the other one, so it need not wait.
    """
    greeting = receive(data)
    if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
        msg = "the call socket did not carry the driver's greeting"
        raise RuntimeFault(msg)
    answer = Payload.of(None).packet(
        Kind.HELLO, epoch=link.epoch, call_id=0, incarnation=link.incarnation
    )
    send(data, answer, None)
    link.tell(Kind.READY)


def _arm_signals() -> None:
    def end(number: int, _frame: FrameType | None) -> None:
        # Once is enough: a second one while the first unwinds would cut clean-up short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise Terminated(number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def _die_of(number: int) -> None:
    """End by *number*, so that the exit status says what happened."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1)  # never returns, except for PID 1 of a namespace, which default actions spare


def _start_exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF
    return 1


def _limit_threads() -> None:
    """Apply ``OMP_NUM_THREADS``: a preloaded torch read it before this worker's own was set."""
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))
