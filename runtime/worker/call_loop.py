"""A worker process from its entry point to its exit status: start, main loop, stop hook.

Guarantees: the driver receives READY, or the exception of the start; calls run one at a time, in
order; a call cancelled before it began is never begun; an exception of a method is that call's
answer and does not end the worker; the stop hook runs however the loop ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.mapping import WorkerExchange
from phalanx.runtime.observe.diagnostics import install_crash_output
from phalanx.runtime.wire.codec import encode
from phalanx.runtime.wire.packet_decoder import Frame, receive, send
from phalanx.runtime.wire.packet_encoder import Payload
from phalanx.runtime.wire.packet_header import Flag, Kind
from phalanx.runtime.wire.progress_page import ProgressPage, register_worker
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.supervision import ExitKind, ExitReason, RuntimeFault

from .control import Boot, Link
from .inbox import Inbox, send_items
from .replies import ReplyQueue
from .termination import Failed, FatalExit, Terminated, Termination, die_of, ignore_signals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .control import Hosted
    from .tracing import ServerSpan

_OOM_SCORE = 300  # thousandths of all memory that a worker counts as larger than it is; arbitrary
_MOST_OOM_SCORE = 1000


def main(payload: bytes, fds: Mapping[str, int]) -> int:
    """Run one worker; return its exit code."""
    if "stdin" in fds:
        os.dup2(fds["stdin"], 0)
        os.close(fds["stdin"])
    control = socket.socket(fileno=fds["control"])
    data = descriptors.own(socket.socket(fileno=fds["data"]))  # no fork of this process answers
    page = ProgressPage(fds["page"])
    boot: Boot = pickle.loads(payload)
    link = Link(control, boot.rank, boot.incarnation, boot.epoch, fds)
    register_worker()
    _yield_memory()
    install_crash_output(fds["faults"])
    termination = Termination()
    try:
        try:
            _limit_threads()
            hosted = boot.host(boot.blob, link)
            _limit_threads()  # a spare has been given the environment of its rank meanwhile
            link.serve(termination)
            hosted.start()
        except Terminated:
            raise
        except BaseException as error:  # noqa: BLE001  # sys.exit in a start is a failed start
            link.tell(Kind.START_FAILED, RemoteFailure.of(error))
            code = error.code if isinstance(error, SystemExit) else None
            return code & 0xFF if isinstance(code, int) else 1
        _greet(data, link)
        return CallLoop(data, link, page, hosted, termination).run()
    except Terminated as end:
        die_of(end.number)
        return 128 + end.number
    finally:
        if not link.original[0]:
            os._exit(1)  # a forked copy, which would go on as the worker


def _greet(data: socket.socket, link: Link) -> None:
    """Prove both directions of the call socket, then say READY.

    The driver put a greeting into the socket before this process existed; the answer lies there
    before the driver reads READY from the other one, so it need not wait.
    """
    greeting = receive(data)
    if not isinstance(greeting, Frame) or greeting.kind != Kind.HELLO:
        raise RuntimeFault("the call socket did not carry the driver's greeting")
    answer = Payload.of(None).packet(
        Kind.HELLO, epoch=link.epoch, call_id=0, incarnation=link.incarnation
    )
    send(data, answer, None)
    link.tell(Kind.READY)


def _yield_memory() -> None:
    """Have the kernel kill this process before the driver when memory runs out.

    A worker can be restarted, the driver cannot. What a worker starts inherits it.
    """
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(_MOST_OOM_SCORE, int(path.read_text()) + _OOM_SCORE)))


def _limit_threads() -> None:
    """Apply ``OMP_NUM_THREADS``: a preloaded torch read it before this worker's own was set."""
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and wanted.isdigit() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))


class CallLoop:
    """The main loop of one worker."""

    def __init__(
        self,
        data: socket.socket,
        link: Link,
        page: ProgressPage,
        hosted: Hosted,
        termination: Termination,
    ) -> None:
        exchange = WorkerExchange.inherit(link.fds)
        self._link = link
        self._page = page
        self._hosted = hosted
        self._termination = termination
        self._fatal_exit = FatalExit(link, hosted)
        self._replies = ReplyQueue(data, exchange, link, self._fatal_exit)
        self._arena = exchange.arena
        self._after_reply = hosted.after_reply
        self._inbox = Inbox(data, exchange.reader, hosted.note_foreign_packet, self._replies.go_on)

    def run(self) -> int:
        """Serve until a stop is requested; return the exit code."""
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
        # A second signal must not cut the stop hook short; the driver has a deadline for it.
        ignore_signals()
        # Before the other ranks see its connections close.
        with contextlib.suppress(OSError):
            self._link.tell(Kind.ENDING)
        self._hosted.stop(reason)

    def _serve(self) -> None:
        inbox = self._inbox
        arena = self._arena
        page = self._page
        termination = self._termination
        while True:
            if termination.raised:  # and was caught where it was raised
                raise Terminated(termination.raised)
            # Not while an answer is being computed on the other thread.
            if (spin := page.spin) and not self._replies.unsent:
                inbox.look(spin)
            if arena.is_warm:
                self._await_message()
            frame = inbox.take()
            if self._fatal_exit.is_ending:
                self._fatal_exit.await_end()
            if frame is None or frame.kind == Kind.STOP:
                return  # None: the driver is gone, or has closed the group
            if frame.kind == Kind.CALL:
                self._call(frame)
            elif frame.kind == Kind.REFORM:
                self._reform(frame)

    def _await_message(self) -> None:
        """Return when a message is there, or all memory has been given back."""
        while (wait := self._arena.trim_if_idle(time.monotonic())) is not None:
            if not self._inbox.is_quiet(wait):
                return

    def _reform(self, frame: Frame) -> None:
        link = self._link
        self._replies.finish()  # they were begun in the group that is left
        link.enter(frame.epoch)
        try:
            self._hosted.reform(frame.value())
            link.check_results()  # another death, and the next order to leave, came meanwhile
        except Exception as error:  # noqa: BLE001  # the driver handles it
            link.tell(Kind.NOT_REFORMED, RemoteFailure.of(error))
        else:
            link.tell(Kind.READY)

    def _call(self, frame: Frame) -> None:
        call_id = frame.call_id
        page = self._page
        now = page.begin(call_id)
        sent_in = frame.incarnation
        if sent_in != now and page.is_void(
            call_id, sent_in, now, collective=bool(frame.flags & Flag.COLLECTIVE)
        ):
            page.finish(call_id, served=False)
            frame.drop()
            self._inbox.forget(call_id)
            self._replies.skip(frame)
            return
        if frame.epoch > self._link.epoch:  # a call for this rank alone may be from before
            self._link.epoch = frame.epoch
            self._hosted.adopt(frame.epoch)
        flags = frame.flags
        span: ServerSpan | None = None
        holds = False
        try:
            method, args, kwargs, *carrier = frame.value()
            if carrier:
                span = self._hosted.span(method, carrier[0])
            result = self._hosted.invoke(method, args, kwargs)
            if self._link.aborts != self._link.entered_at:
                self._link.check_results()
            # Before the answer, so that the arguments' memory is free for the next call.
            del args, kwargs
            if flags & Flag.STREAM:
                self._stream(frame, result)
                result = None
            if span is not None:
                result = span.returned(result)
        except (Terminated, SystemExit) as end:
            if span is not None:
                span.raised(end)
            raise
        except BaseException as error:  # noqa: BLE001  # the caller handles it; asyncio's too
            if span is not None:
                span.raised(error)
            holds = self._refuse(frame, error)
        else:
            if not flags & Flag.MARKED:
                self._replies.answer(frame, result)
            else:
                holds = self._save_and_answer(frame, result)
        if self._after_reply is not None:
            self._after_reply()
        page.finish(call_id)
        if flags & Flag.PACED and self._replies.unsent:
            self._replies.pass_by(frame)
        if holds:
            self._inbox.await_leave(call_id)

    def _stream(self, frame: Frame, made: Any) -> None:
        """Send the items of *made*."""
        try:
            send_items(frame, made, self._inbox, self._replies, self._page, self._hosted.end_copy)
            self._link.check_results()
        finally:
            self._hosted.end_copy()

    def _refuse(self, frame: Frame, error: BaseException) -> bool:
        """Answer with *error*; return whether this worker holds for it."""
        failed = self._fatal_exit.judge(error)
        # The state after a fatal error is not stored.
        saves = frame.flags & Flag.MARKED and not failed.ends
        spoilt = self._save(frame) if saves else None
        self._replies.refuse(frame, failed)
        if spoilt is not None:
            self._fatal_exit.end_if_fatal(spoilt)
        return failed.holds

    def _save_and_answer(self, frame: Frame, result: Any) -> bool:
        """Answer after the state has been stored; return whether this worker holds for an error."""
        spoilt = self._save(frame)
        self._replies.answer(frame, result)
        if spoilt is None:
            return False
        self._fatal_exit.end_if_fatal(spoilt)
        return spoilt.holds

    def _save(self, call: Frame) -> Failed | None:
        """Store the state, before the answer; return the error of its hook, if any."""
        self._page.save(call.call_id)
        if call.flags & Flag.PACED:
            self._replies.tell_saving(call)
        try:
            saved = self._hosted.save(call.call_id)
        except (Terminated, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  # the call continues; the driver gets it
            failed = self._fatal_exit.judge(error)
            failure = encode(RemoteFailure.of(error), "the error")
            flags = Flag.HELD if failed.holds else Flag.NONE
            self._replies.note(call, Kind.NOT_SAVED, Payload.of(failure), flags)
            return failed
        self._replies.note(call, Kind.SAVED, saved)
        return None
