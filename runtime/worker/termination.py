"""SIGTERM and SIGINT in a worker, and its end by an error that the decider calls fatal.

A worker's end by a signal: raised where its main thread is, and told by its exit status.

Guarantees: SIGTERM or SIGINT ends the worker once, also in the middle of a call; a second one
while the first unwinds is ignored. SIGTERM that the driver did not send is held off for a moment:
systemd sends it to every process of a unit at once, and a driver that is stopping in good order has
this worker finish its calls first.

Left to others: what is cleaned up on the way (`serving`).

The end of a worker for an error of its own method, where the decider says so.

Guarantees: the answer leaves before the process ends, and before it leaves no further call
is begun any more: what the caller does next finds the next incarnation. The driver is told why.

Left to others: what is decided (`Hosted.judge`), and what follows (the group's actor).
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from phalanx.runtime.wire.protocol import Kind
from phalanx.runtime.wire.remote_exception import RemoteFailure
from phalanx.supervision import Directive, is_broken_process_group

if TYPE_CHECKING:
    from types import FrameType

    from .control import Link


class Judge(Protocol):
    """Who decides, and whom to tell of the end."""

    def judge(self, error: BaseException) -> Directive:
        """Return what becomes of this worker, whose method raised *error*."""
        ...

    def end_copy(self) -> None:
        """End this process if it is a forked copy of the worker, which has left the user's code."""
        ...

    def fail(self, error: BaseException) -> None:
        """Run the user's failure hook: *error* is about to end this worker."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one error of a method means.

    Attributes:
        directive: What becomes of this worker.
        joined: It is in a process group with others, which may wait for it in a collective
            operation that it has not begun.
        broken: That process group can be used no more.
    """

    directive: Directive
    joined: bool = False
    broken: bool = False

    @property
    def ends(self) -> bool:
        """Whether this worker is about to end."""
        return self.directive is not Directive.RESUME

    @property
    def holds(self) -> bool:
        """Whether this worker begins no later call before the driver lets it."""
        return self.joined and not self.ends


@dataclass(frozen=True, slots=True)
class Failed:
    """What a method, or a hook, raised in place of what it would have returned; weighed."""

    error: BaseException
    verdict: Verdict


class Doom:
    """What errors mean for one worker. Thread-safe: answers are sent by two threads.

    Attributes:
        is_sealed: Whether this process is about to end.
    """

    def __init__(self, link: Link, judge: Judge) -> None:
        self._link = link
        self._judge = judge
        self.is_sealed = False

    def weigh(self, error: BaseException) -> Verdict:
        """Return what *error* means, once; where that is the end, no call is begun any more.

        A process group that broke is formed anew by the driver, which knows of deaths behind it,
        and whether ranks are kept: to be restarted for that is not for each rank to do.
        """
        directive = self._judge.judge(error)
        joined = is_in_process_group()
        broken = joined and is_broken_process_group(error)
        if broken and directive is Directive.RESTART:
            directive = Directive.RESUME
        verdict = Verdict(directive, joined, broken)
        if verdict.ends:
            self.is_sealed = True
        return verdict

    def end_copy(self) -> None:
        """See `Judge.end_copy`."""
        self._judge.end_copy()

    def await_end(self) -> None:
        """Keep this thread from doing anything, while another ends the process."""
        while True:
            time.sleep(60.0)

    def carry_out(self, failed: Failed) -> None:
        """End this process at once, from whichever thread, unless it is to go on."""
        if not failed.verdict.ends:
            return
        error, directive = failed.error, failed.verdict.directive
        failure = RemoteFailure.of(error)
        self._link.tell(Kind.LAST_WORDS, replace(failure, directive=directive.value))
        self._judge.fail(error)
        told = f"{failure.trace}\nended by the decider ({directive}) for the error above\n"
        sys.stderr.write(told)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without clean-up: what has broken a process may hold its clean-up up for ever.
        os._exit(1)


def is_in_process_group() -> bool:
    """Whether this process has joined a process group with others."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    alone: bool = dist.get_world_size() == 1
    return not alone


_MOMENT: Final = (
    1.0  # seconds for a driver that has had SIGTERM too to say so; it takes milliseconds
)


class Terminated(BaseException):
    """SIGTERM or SIGINT, raised where the main thread happens to be."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Termination:
    """SIGTERM and SIGINT of one worker: they raise `Terminated` in its main thread, once.

    A child that the user's code forks has Python's own handlers. SIGTERM is blocked across the
    fork: CPython drops what a handler was told of before the child runs, and `multiprocessing`,
    which ends its children by SIGTERM, would wait for ever for one that it ends so early.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._heard = threading.Event()
        self._listens = False  # to the driver: else a SIGTERM of its own could not be told
        self._is_held = False
        self._drains = False
        self._is_due = False
        self._forking = threading.local()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork,
            after_in_child=self._in_child,
        )

    def listen(self) -> None:
        """Hold SIGTERM off from now on, until `hear` says whose it is."""
        self._listens = True

    def hear(self, kind: int | None) -> None:
        """Take what the driver says of this worker's end; None where it says nothing more."""
        if kind == Kind.DRAINING:
            self._drains = True
        elif kind == Kind.TERMINATE:
            self._raise_now()
        else:
            self._listens = False
        self._heard.set()

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
        if held and os.getpid() == self._pid:  # a child forked by C code has nothing that listens
            if not self._is_held:
                self._is_held = True
                # Not `Thread`, whose lock this thread may have been interrupted with.
                _thread.start_new_thread(self._hold_off, ())
            return
        # Once is enough: a second one while the first unwinds would cut clean-up short.
        ignore_signals()
        raise Terminated(number)

    def _hold_off(self) -> None:
        self._heard.wait(_MOMENT)
        if not self._drains:
            self._raise_now()

    def _raise_now(self) -> None:
        self._is_due = True
        main = threading.main_thread().ident
        assert main is not None
        if signal.getsignal(signal.SIGTERM) == self._on_signal:  # one of the user's has had it
            signal.pthread_kill(main, signal.SIGTERM)


def ignore_signals() -> None:
    """Have neither cut short what the worker does last."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_of(number: int) -> None:
    """End by *number*, so that the exit status says what happened."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1)  # never returns, except for PID 1 of a namespace, which default actions spare
