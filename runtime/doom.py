"""The end of a worker for an error of its own method, where the decider says so.

Guarantees: the answer leaves before the process ends, and before it leaves no further call
is begun any more: what the caller does next finds the next incarnation. The driver is told why.

Left to others: what is decided (`Hosted.judge`), and what follows (the group's actor).
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from phalanx.supervision import Directive

from .remote_failure import RemoteFailure
from .wire import Kind

if TYPE_CHECKING:
    from .link import Link


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


class Doom:
    """What errors mean for one worker. Thread-safe: answers are sent by two threads.

    Attributes:
        is_sealed: Whether this process is about to end.
    """

    def __init__(self, link: Link, judge: Judge) -> None:
        self._link = link
        self._judge = judge
        self.is_sealed = False

    def weigh(self, error: BaseException) -> Directive:
        """Return what *error* means; where that is the end, no call is begun any more."""
        directive = self._judge.judge(error)
        if directive is not Directive.RESUME:
            self.is_sealed = True
        return directive

    def end_copy(self) -> None:
        """See `Judge.end_copy`."""
        self._judge.end_copy()

    def await_end(self) -> None:
        """Keep this thread from doing anything, while another ends the process."""
        while True:
            time.sleep(60.0)

    def carry_out(self, directive: Directive, error: BaseException) -> None:
        """End this process at once, from whichever thread, unless it is to go on."""
        if directive is Directive.RESUME:
            return
        failure = RemoteFailure.of(error)
        self._link.tell(Kind.LAST_WORDS, replace(failure, directive=directive.value))
        self._judge.fail(error)
        told = f"{failure.trace}\nended by the decider ({directive}) for the error above\n"
        sys.stderr.write(told)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without clean-up: what has broken a process may hold its clean-up up for ever.
        os._exit(1)
