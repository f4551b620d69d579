"""The sending end of a stream: a worker's generator, whose items leave one by one.

Guarantees: no item is made that the driver has not asked for; a stream the driver closes has its
generator closed, on the main thread, at the next item; so has one whose worker is told to stop,
which ends in an error rather than looking complete. What comes for others meanwhile is kept, in
order, for whoever serves next.

Left to others: the end of a stream, which is an ordinary answer (`replies`); who takes the items
(`actors.streams`).

The driver grants items by `Kind.MORE`, whose *extra* is how many it wants in all, and closes a
stream by `Kind.CLOSE`, whose *extra* is how many any rank may have begun to make. Both may come
before the stream has begun. Ranks that share a process group make all of those before they close:
one that closed earlier would be missing in what the others do for the next item.
"""

from __future__ import annotations

import functools
import select
from collections import deque
from typing import TYPE_CHECKING, Any

from phalanx.runtime.wire.frame import Frame, receive, unbundle
from phalanx.runtime.wire.protocol import Kind
from phalanx.runtime.wire.spinner import Spinner
from phalanx.supervision import ExecutorClosed

from .termination import is_in_process_group

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from phalanx.runtime.memory.mapping import ArenaReader
    from phalanx.runtime.wire.progress_page import Board

    from .replies import ReplyLine

CLOSED = -1


class Inbox:
    """What the driver sends one worker: calls in order, and what is said about streams beside them.

    Args:
        on_foreign: Told of the first packet that was no frame; all of them are dropped.
    """

    def __init__(
        self, sock: socket.socket, lender: ArenaReader, on_foreign: Callable[[], None]
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
        self._latest = 0  # the call taken last; what is said of earlier ones is too late
        self._let_go = 0  # the call after which the driver let this worker go on last
        self._on_foreign = on_foreign
        self._foreign = 0

    def take(self) -> Frame | None:
        """Return the next frame that is not about a stream, or None at the end; waits for it."""
        ahead = self._ahead
        while not ahead:
            self._read()
        frame = ahead.popleft()
        if frame is not None and frame.kind == Kind.CALL:
            self._latest = frame.call_id
        return frame

    def look(self, seconds: float) -> None:
        """Look for what comes for a moment, if that has been worth it; does not sleep meanwhile."""
        if not self._ahead:
            self._spinner.look(self._look, seconds)

    def is_quiet(self, seconds: float) -> bool:
        """Whether nothing comes for *seconds*."""
        return not self._ahead and not self._readable.poll(seconds * 1000)

    def granted(self, call_id: int, sent: int) -> int:
        """Return how many items of *call_id* are wanted, more than *sent*; waits for that.

        `CLOSED` if no more are.

        Raises:
            ExecutorClosed: this worker is to stop.
        """
        while True:
            while not self._is_ending() and self._readable.poll(0):
                self._read()
            if self._is_ending():
                msg = "the worker was told to stop in the middle of a stream"
                raise ExecutorClosed(msg)
            granted = self._granted.get(call_id, 0)
            if granted == CLOSED or granted > sent:
                return granted
            self._read()

    def await_leave(self, call_id: int) -> None:
        """Return once this worker may begin what comes after *call_id*.

        Where it is to stop instead, nothing comes any more but that.
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
        """The stream *call_id* has ended."""
        self._granted.pop(call_id, None)
        self._begun.pop(call_id, None)

    def _is_ending(self) -> bool:
        if not self._ahead:
            return False
        last = self._ahead[-1]
        return last is None or last.kind == Kind.STOP

    def _read(self) -> None:
        """Read one packet; waits for it."""
        try:
            frame = receive(self._sock, self._lender)
        except ConnectionResetError:
            return
        if not isinstance(frame, Frame):
            if frame is None:
                self._drop_foreign()
            else:
                self._ahead.append(None)
        elif frame.kind == Kind.CALL:
            self._ahead.append(frame)
        elif frame.kind == Kind.BUNDLE:
            frames = unbundle(frame, self._lender)
            if frames is None:
                self._drop_foreign()
            else:
                for each in frames:
                    self._keep(each)
        else:
            self._keep(frame)

    def _keep(self, frame: Frame) -> None:
        if frame.kind == Kind.GO_ON:
            self._let_go = frame.call_id
        elif frame.kind not in (Kind.MORE, Kind.CLOSE):
            self._ahead.append(frame)
        elif frame.call_id >= self._latest and self._granted.get(frame.call_id) != CLOSED:
            if frame.kind == Kind.CLOSE:
                self._begun[frame.call_id] = frame.extra
            self._granted[frame.call_id] = CLOSED if frame.kind == Kind.CLOSE else frame.extra

    def _drop_foreign(self) -> None:
        self._foreign += 1
        if self._foreign == 1:
            self._on_foreign()


def send_items(  # noqa: PLR0917
    call: Frame,
    made: Any,
    inbox: Inbox,
    replies: ReplyLine,
    board: Board,
    end_copy: Callable[[], None],
) -> None:
    """Send the items of *made* as they are asked for; return at its end, or once it is closed.

    On *board* each item counts from when it was asked for: that is how long one may take.
    *end_copy* is called whenever the user's code has been left, see `Hosted.end_copy`.

    Raises:
        TypeError: *made* is nothing that could be iterated.
        ExecutorClosed: this worker is to stop.
        Exception: what the iteration raises, or `NotPicklable` for an item that cannot travel.
    """
    items = iter(made)
    end_copy()
    sent = 0
    try:
        while True:
            board.rest()
            granted = inbox.granted(call.call_id, sent)
            board.go_on()
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
