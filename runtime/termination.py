"""A worker's end by a signal: raised where its main thread is, and told by its exit status.

Guarantees: SIGTERM or SIGINT ends the worker once, also in the middle of a call; a second one
while the first unwinds is ignored. SIGTERM that the driver did not send is held off for a moment:
systemd sends it to every process of a unit at once, and a driver that is stopping in good order has
this worker finish its calls first.

Left to others: what is cleaned up on the way (`serving`).
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from .wire import Kind

if TYPE_CHECKING:
    from types import FrameType


_MOMENT: Final = (
    1.0  # seconds for a driver that has had SIGTERM too to say so; it takes milliseconds
)


class Terminated(BaseException):
    """SIGTERM or SIGINT, raised where the main thread happens to be."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Termination:
    """SIGTERM and SIGINT of one worker: they raise `Terminated` in its main thread, once."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._heard = threading.Event()
        self._listens = False  # to the driver: else a SIGTERM of its own could not be told
        self._is_held = False
        self._drains = False
        self._is_due = False
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

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

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        held = number == signal.SIGTERM and self._listens and not self._is_due
        if held and os.getpid() == self._pid:  # a forked child has nothing that would listen
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
