"""Inbox of a worker, and the sending end of streams.

Guarantees: no item is made that the driver has not requested; the generator of a stream that the
driver closes is closed on the main thread, at the next item; so is one whose worker is to stop,
which ends in an error. Frames that arrive meanwhile are kept in order.

The driver grants items by `Kind.MORE`, whose *extra* is how many it wants in all, and closes a
stream by `Kind.CLOSE`, whose *extra* is how many any rank may have begun to make. Both may arrive
before the stream has begun. Ranks that share a process group make all of those before they close:
one that closed earlier would be missing from the collective operations of the next item.
"""

from __future__ import annotations

import functools
import select
from collections import deque
from typing import TYPE_CHECKING, Any

from phalanx.runtime.wire.packet_decoder import Frame, receive, unbundle
from phalanx.runtime.wire.packet_header import Kind
from phalanx.runtime.wire.spinner import Spinner
from phalanx.supervision import ExecutorClosed

from .termination import is_in_process_group

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from phalanx.runtime.memory.mapping import ArenaReader
    from phalanx.runtime.wire.progress_page import ProgressPage

    from .replies import ReplyQueue

CLOSED = -1


class Inbox:
    """Received frames of one worker: calls in order, and grants of streams.

    Args:
        on_foreign_packet: Called at the first malformed packet; all of them are dropped.
        on_go_on: Called with the call behind which this worker may go on.
    """

    def __init__(
        self,
        sock: socket.socket,
        lender: ArenaReader,
        on_foreign_packet: Callable[[], None],
        on_go_on: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._sock = sock
        self._lender = lender
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._look = functools.partial(self._readable.poll, 0)
        self._spinner = Spinner()
        self._ahead: deque[Frame | None] = deque()
        self._granted: dict[int, int] = {}  # by call id: how many items are wanted, or CLOSED
        self._begun: dict[int, int] = {}  # of closed ones: how many items any rank may have begun
        self._received = 0  # the latest call: the driver may send one twice, and numbers grow
        self._latest = 0  # the call taken last; frames about earlier ones are stale
        self._let_go = 0  # the call of the last `Kind.GO_ON`
        self._on_foreign_packet = on_foreign_packet
        self._on_go_on = on_go_on
        self._foreign_packets = 0

    def take(self) -> Frame | None:
        """Wait for and return the next frame that is not about a stream; None at the end."""
        ahead = self._ahead
        while not ahead:
            self._read()
        frame = ahead.popleft()
        if frame is not None and frame.kind == Kind.CALL:
            self._latest = frame.call_id
        return frame

    def look(self, seconds: float) -> None:
        """Poll for *seconds* for a frame without sleeping, if that has paid off (`Spinner`)."""
        if not self._ahead:
            self._spinner.look(self._look, seconds)

    def is_quiet(self, seconds: float) -> bool:
        """Whether nothing arrives for *seconds*."""
        return not self._ahead and not self._readable.poll(seconds * 1000)

    def granted(self, call_id: int, sent: int) -> int:
        """Wait until more than *sent* items of *call_id* are wanted; return how many in all.

        Returns `CLOSED` if the stream is closed.

        Raises:
            ExecutorClosed: this worker is to stop.
        """
        while True:
            while not self._is_ending() and self._readable.poll(0):
                self._read()
            if self._is_ending():
                raise ExecutorClosed("the worker was stopped in the middle of a stream")
            granted = self._granted.get(call_id, 0)
            if granted == CLOSED or granted > sent:
                return granted
            self._read()

    def await_leave(self, call_id: int) -> None:
        """Return once this worker may begin the call after *call_id*, or is to stop.

        In that case every call before the stop is dropped.
        """
        while self._let_go < call_id:
            if self._is_ending():
                while len(self._ahead) > 1:
                    dropped = self._ahead.popleft()
                    if dropped is not None:
                        dropped.drop()
                return
            self._read()

    def begun(self, call_id: int) -> int:
        """Return how many items of *call_id*, which is closed, any rank may have begun to make."""
        return self._begun.get(call_id, 0)

    def forget(self, call_id: int) -> None:
        """Forget the stream *call_id*, which has ended."""
        self._granted.pop(call_id, None)
        self._begun.pop(call_id, None)

    def _is_ending(self) -> bool:
        if not self._ahead:
            return False
        last = self._ahead[-1]
        return last is None or last.kind == Kind.STOP

    def _read(self) -> None:
        """Wait for one packet and read it."""
        try:
            frame = receive(self._sock, self._lender)
        except ConnectionResetError:
            return
        if not isinstance(frame, Frame):
            if frame is None:
                self._drop_foreign_packet()
            else:
                self._ahead.append(None)
        elif frame.kind == Kind.BUNDLE:
            frames = unbundle(frame, self._lender)
            if frames is None:
                self._drop_foreign_packet()
            else:
                for each in frames:
                    self._keep(each)
        else:
            self._keep(frame)

    def _keep(self, frame: Frame) -> None:
        if frame.kind == Kind.CALL:
            if frame.call_id > self._received:
                self._received = frame.call_id
                self._ahead.append(frame)
            else:
                frame.drop()
        elif frame.kind == Kind.GO_ON:
            self._let_go = frame.call_id
            self._on_go_on(frame.call_id)
        elif frame.kind not in (Kind.MORE, Kind.CLOSE):
            self._ahead.append(frame)
        elif frame.call_id >= self._latest and self._granted.get(frame.call_id) != CLOSED:
            for ended in [each for each in self._granted if each < self._latest]:
                self.forget(ended)  # it came after the end of its stream, or that never began
            if frame.kind == Kind.CLOSE:
                self._begun[frame.call_id] = frame.extra
            self._granted[frame.call_id] = CLOSED if frame.kind == Kind.CLOSE else frame.extra

    def _drop_foreign_packet(self) -> None:
        self._foreign_packets += 1
        if self._foreign_packets == 1:
            self._on_foreign_packet()


def send_items(  # noqa: PLR0917
    call: Frame,
    made: Any,
    inbox: Inbox,
    replies: ReplyQueue,
    page: ProgressPage,
    end_copy: Callable[[], None],
) -> None:
    """Send the items of *made* as they are granted; return at its end, or once it is closed.

    On *page* each item counts from its grant on. *end_copy* is called after each piece of user
    code, see `Hosted.end_copy`.

    Raises:
        TypeError: *made* is not iterable.
        ExecutorClosed: this worker is to stop.
        Exception: what the iteration raises, or `NotPicklable`.
    """
    items = iter(made)
    end_copy()
    sent = 0
    try:
        while True:
            page.rest()
            granted = inbox.granted(call.call_id, sent)
            page.go_on()
            if granted == CLOSED and not (
                sent < inbox.begun(call.call_id) and is_in_process_group()
            ):
                return
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                end_copy()
            sent += 1
            if granted != CLOSED:
                replies.item(call, sent, item)
            del item
    finally:
        inbox.forget(call.call_id)
        close = getattr(items, "close", None)
        if close is not None:
            close()
