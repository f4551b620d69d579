"""Replies of a worker, in the order of its calls.

Guarantees: exactly one answer per call, in call order; an answer that is ready leaves on the main
thread unless an earlier one is still being computed; an `AsyncOutput` is resolved on one output
thread while the main thread runs the next call; an unpicklable value becomes that call's error.
Behind an output that raised in a process group none is resolved before the driver allows it.
"""

from __future__ import annotations

import functools
import queue
import socket
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from phalanx.runtime.wire.codec import encode
from phalanx.runtime.wire.packet_decoder import Frame, send
from phalanx.runtime.wire.packet_encoder import Payload
from phalanx.runtime.wire.packet_header import EVERY_RANK, HEADER, MAGIC, Flag, Kind
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.supervision import Directive, MessageTooLarge, NotPicklable

from .control import ResultsUndefined

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.runtime.memory.mapping import WorkerExchange

    from .control import Link
    from .termination import Failed, FatalExit


class AsyncOutput(ABC):
    """Returned by a method whose answer is computed while the next call runs."""

    @abstractmethod
    def get_output(self) -> object:
        """Return the answer; called on the worker's output thread, after all earlier answers."""


class ReplyQueue:
    """Sends one worker's answers in order.

    Attributes:
        unsent: How many answers are still being computed.
    """

    def __init__(
        self, sock: socket.socket, exchange: WorkerExchange, link: Link, fatal_exit: FatalExit
    ) -> None:
        self._sock = sock
        self._fatal_exit = fatal_exit
        self._exchange = exchange
        self._link = link
        self._rank = link.rank
        self._incarnation = link.incarnation
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._let_go = 0  # the call of the last `Kind.GO_ON`
        self._is_closing = False
        self._held_by = 0  # the call whose output raised; the output thread's own
        self.unsent = 0

    def answer(self, call: Frame, result: Any) -> None:
        """Answer *call* with *result*, now or after earlier answers."""
        begun = self._link.entered_at
        if result is None and not self.unsent:
            self._acknowledge(call)
        elif isinstance(result, AsyncOutput):
            self._later(lambda: self._resolve(call, result, begun))
        elif self.unsent:
            self._later(self._ready(call, result, begun))
        else:
            self._ready(call, result, begun)()

    def refuse(self, call: Frame, failed: Failed) -> None:
        """Answer *call* with the error of its method."""
        self._in_turn(lambda: self._send_failed(call, failed))

    def skip(self, call: Frame) -> None:
        """Report that *call* was cancelled before it began."""
        self._in_turn(lambda: self._send(call, Kind.SKIPPED, None))

    def item(self, call: Frame, number: int, value: Any) -> None:
        """Send the *number*-th item of the stream that *call* began.

        Raises:
            NotPicklable, MessageTooLarge: it cannot travel.
            ResultsUndefined: its process group was aborted.
        """
        encoded = encode(value, f"item {number} of the stream")
        self._link.check_results()
        self._send(call, Kind.ITEM, encoded, extra=number)

    def pass_by(self, call: Frame) -> None:
        """Report that the next call can be sent, though *call* may not be answered yet."""
        self._send(call, Kind.PASSED, None)

    def tell_saving(self, call: Frame) -> None:
        """Report that *call* has run and its state is being stored, for ranks elsewhere."""
        self._send(call, Kind.SAVING, None)

    def note(self, call: Frame, kind: int, payload: Payload, flags: int = Flag.NONE) -> None:
        """Send *payload*, which is closed then, ahead of the answer to *call*."""
        self._send(call, kind, payload, flags)

    def go_on(self, call_id: int) -> None:
        """Let outputs behind *call_id* be resolved."""
        with self._news:
            self._let_go = call_id
            self._news.notify_all()

    def finish(self) -> None:
        """Return when deferred outputs are computed and sent, blocked or not.

        The driver limits this by `leave_within`.
        """
        with self._news:
            while self.unsent and not self._is_closing:
                self._let_go = max(self._let_go, self._held_by)
                self._news.notify_all()
                self._news.wait()

    def close(self) -> None:
        """Send outputs still being computed, unless blocked; then end the output thread."""
        with self._lock:
            waiting = self._waiting
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        if waiting is not None:
            waiting.put(None)
            self._thread.join()

    def _in_turn(self, send: Callable[[], None]) -> None:
        if self.unsent:
            self._later(send)
        else:
            send()

    def _later(self, send: Callable[[], None]) -> None:
        """Have *send* called on the output thread, after what was put off before it."""
        with self._lock:
            self.unsent += 1
            if self._waiting is None:
                self._waiting = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._waiting,), name="phalanx-output", daemon=True
                )
                self._thread.start()
        self._waiting.put(send)

    def _run(self, waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (send := waiting.get()) is not None:
            send()
            with self._lock:
                self.unsent -= 1
            with self._news:
                self._news.notify_all()
            if self._held_by and not self._await_leave(self._held_by):
                return

    def _await_leave(self, call_id: int) -> bool:
        """Return True once outputs behind *call_id* may be resolved, False at the end."""
        with self._news:
            self._news.wait_for(lambda: self._let_go >= call_id or self._is_closing)
            self._held_by = 0
            return self._let_go >= call_id

    def _resolve(self, call: Frame, output: AsyncOutput, begun: int) -> None:
        try:
            try:
                self._link.check_results(begun)
                result = output.get_output()
            finally:
                self._fatal_exit.end_copy()
        except BaseException as error:  # noqa: BLE001  # it is that call's error, no more
            failed = self._fatal_exit.judge(error)
            self._send_failed(call, failed)
            # In its next operation it would meet the others one operation off.
            self._held_by = call.call_id if failed.holds else 0
        else:
            self._ready(call, result, begun)()

    def _ready(self, call: Frame, result: Any, begun: int) -> Callable[[], None]:
        """Return what answers *call* with *result* as it is now: a later call may change it.

        *begun* is what `Link.check_results` takes.
        """
        wanted = call.extra in (EVERY_RANK, self._rank) and not call.flags & Flag.TELL
        try:
            # To encode a result waits for the device, if nothing has before.
            encoded = encode(result, "the reply") if wanted and result is not None else None
            self._link.check_results(begun)
            if encoded is None:
                return functools.partial(self._acknowledge, call)
            payload = Payload.of(encoded, self._exchange.arena)
        except (NotPicklable, ResultsUndefined, *_NO_ROOM) as error:
            return functools.partial(self._send_error, call, error)
        return functools.partial(self._send_reply, call, payload)

    def _send_reply(self, call: Frame, payload: Payload) -> None:
        try:
            self._send(call, Kind.REPLY, payload)
        except ConnectionError:
            raise
        except OSError as error:
            self._send_error(call, error)

    def _acknowledge(self, call: Frame) -> None:
        """Answer *call* with None."""
        packet = _reply_head(call.epoch, call.call_id, self._incarnation, EVERY_RANK)
        self._sock.send(packet, _NO_SIGNAL)

    def _send_error(self, call: Frame, error: BaseException) -> None:
        """Answer *call*, whose method has run to its end, with *error*."""
        self._send_failed(call, self._fatal_exit.judge(error), may_hold=False)

    def _send_failed(self, call: Frame, failed: Failed, *, may_hold: bool = True) -> None:
        flags = Flag.HELD if may_hold and failed.holds else Flag.NONE
        if failed.broken:
            flags |= Flag.BROKEN
        if failed.directive is Directive.RESTART:
            flags |= Flag.FATAL
        failure = RemoteFailure.of(failed.error)
        try:
            self._send(call, Kind.ERROR, encode(failure, "the error"), flags)
        except ConnectionError:
            raise
        except _NO_ROOM:
            self._send(call, Kind.ERROR, encode(failure.shortened(), "the error"), flags)
        self._fatal_exit.end_if_fatal(failed)

    def _send(
        self, call: Frame, kind: int, encoded: Any, flags: int = Flag.NONE, extra: int = EVERY_RANK
    ) -> None:
        payload: Payload = encoded
        if not isinstance(encoded, Payload):
            payload = Payload.of(encoded, self._exchange.arena)
        try:
            flags |= payload.flags
            head = _head(MAGIC, kind, flags, call.epoch, call.call_id, self._incarnation, extra)
            payload.lend(self._exchange.borrower)
            try:
                if payload.rest:
                    self._sock.sendmsg((head, *payload.rest), (), _NO_SIGNAL)
                else:
                    send(self._sock, head + payload.tail, payload.file)
            except BaseException:
                payload.take_back(self._exchange.borrower)
                raise
        finally:
            payload.close()


_NO_ROOM: Final = (MemoryError, MessageTooLarge, OSError)
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_head: Final = HEADER.pack
_reply_head: Final = functools.partial(HEADER.pack, MAGIC, Kind.REPLY, Flag.NONE)
