"""Ends of a worker: SIGTERM and SIGINT, and an exception that the decider classifies as fatal.

Guarantees: SIGTERM or SIGINT ends the worker once, also in the middle of a call. A SIGTERM that the
driver did not send is deferred: systemd sends it to every process of a unit at once, and a driver
that stops in good order lets this worker finish its calls first. A fatal exception is answered
before the process ends, no call is begun after it, and the driver gets the reason.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from phalanx.runtime.wire.packet_header import Kind
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.supervision import Directive, is_broken_process_group

from .control import ResultsUndefined

if TYPE_CHECKING:
    from types import FrameType

    from .control import Hosted, Link


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that a method or hook raised, and its consequences.

    Attributes:
        directive: The decider's directive for this worker.
        joined: It is in a process group with others, which may wait for it in a collective
            operation that it has not begun.
        broken: That process group is broken.
    """

    error: BaseException
    directive: Directive
    joined: bool
    broken: bool

    @property
    def ends(self) -> bool:
        """Whether this worker is about to end."""
        return self.directive is not Directive.RESUME

    @property
    def holds(self) -> bool:
        """Whether this worker begins no later call before the driver lets it."""
        return self.joined and not self.ends


class FatalExit:
    """Fatal-error exit of one worker. Thread-safe: replies are sent by two threads.

    Attributes:
        is_ending: Whether this process is about to end.
    """

    def __init__(self, link: Link, hosted: Hosted) -> None:
        self._link = link
        self._hosted = hosted
        self.end_copy = hosted.end_copy
        self.is_ending = False

    def judge(self, error: BaseException) -> Failed:
        """Return *error* with its consequences, once; if it is fatal no further call is begun.

        A broken process group is re-formed by the driver, which has the deaths and the survivor
        policy, so it does not restart each rank by itself.
        """
        undefined = isinstance(error, ResultsUndefined)
        directive = Directive.RESUME if undefined else self._hosted.judge(error)
        joined = is_in_process_group()
        broken = joined and is_broken_process_group(error)
        if broken and directive is Directive.RESTART:
            directive = Directive.RESUME
        failed = Failed(error, directive, joined, broken)
        if failed.ends:
            self.is_ending = True
        return failed

    def await_end(self) -> None:
        """Block this thread while another ends the process."""
        while True:
            time.sleep(60.0)

    def end_if_fatal(self, failed: Failed) -> None:
        """End this process at once, from any thread, if the error is fatal."""
        if not failed.ends:
            return
        error, directive = failed.error, failed.directive
        failure = RemoteFailure.of(error)
        try:
            self._link.tell(Kind.LAST_WORDS, replace(failure, directive=directive.value))
            self._hosted.fail(error)
            message = f"{failure.trace}\nended by the decider ({directive}) for the error above\n"
            sys.stderr.write(message)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever fails of that, such as the flush of a stream that is closed
            # Without clean-up, which a broken process may never finish.
            os._exit(1)


def is_in_process_group() -> bool:
    """Whether this process has joined a process group with others."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return False
    world = dist.group.WORLD  # read once: the control thread may give it up meanwhile
    return world is not None and bool(world.size() > 1)


_MOMENT: Final = 1.0  # seconds for a driver that also got SIGTERM to say so
_AGAIN: Final = 0.1  # seconds until a signal that has had no effect is sent again


class Terminated(BaseException):
    """SIGTERM or SIGINT, raised where the main thread happens to be."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Termination:
    """SIGTERM and SIGINT of one worker: they raise `Terminated` in its main thread, once.

    A child that the user's code forks has Python's own handlers. SIGTERM is blocked across the
    fork: CPython drops a signal that is pending in the interpreter when the child starts, and
    `multiprocessing`, which ends its children by SIGTERM, would wait for that child for ever.

    Attributes:
        raised: The signal for which it was raised; 0 for none. Code of the user may catch it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._message_received = threading.Event()
        self._listens = False  # to the driver, which says whether a SIGTERM is its own
        self._is_held = False
        self._drains = False
        self._is_due = False
        self.raised = 0
        self._forking = threading.local()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._in_child,
        )

    def listen(self) -> None:
        """Defer SIGTERM from now on, until `on_message` gets its kind."""
        self._listens = True

    def on_message(self, kind: int | None) -> None:
        """Handle a message about this worker's end; None: there will be no more."""
        if kind == Kind.DRAINING:
            self._drains = True
        elif kind == Kind.TERMINATE:
            try:
                _thread.start_new_thread(self._raise_now, ())
            except RuntimeError:  # the limit of threads is reached
                self._raise_now()
        else:
            self._listens = False
        self._message_received.set()

    def _before_fork(self) -> None:
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _in_child(self) -> None:
        for number, own in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        ):
            if signal.getsignal(number) == self._on_signal:  # else it is one of the user's
                signal.signal(number, own)
        self._after_fork()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        held = number == signal.SIGTERM and self._listens and not self._is_due
        if held and os.getpid() == self._pid:  # in a child forked by C code no thread listens
            with contextlib.suppress(RuntimeError):  # no thread can be started: it ends at once
                if not self._is_held:
                    # Not `Thread`, whose lock this thread may have been interrupted with.
                    _thread.start_new_thread(self._hold_off, ())
                    self._is_held = True
                return
        # A second signal while the first unwinds would cut clean-up short.
        ignore_signals()
        self.raised = number
        raise Terminated(number)

    def _hold_off(self) -> None:
        self._message_received.wait(_MOMENT)
        if not self._drains:
            self._raise_now()

    def _raise_now(self) -> None:
        self._is_due = True
        main = threading.main_thread().ident
        assert main is not None
        # One that comes just before the main thread sleeps is noticed when it wakes: so once more.
        # The handler goes when it has had effect; one of the user's has had the first.
        while signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(_AGAIN)


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from now on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_of(number: int) -> None:
    """End by signal *number*, so that the exit status shows it."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also if one of them is closed
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    time.sleep(1)  # never returns, except for PID 1 of a namespace, which default actions spare
