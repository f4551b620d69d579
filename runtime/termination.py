"""A worker's end by a signal: raised where its main thread is, and told by its exit status.

Guarantees: SIGTERM or SIGINT ends the worker once, also in the middle of a call; a second one
while the first unwinds is ignored.

Left to others: what is cleaned up on the way (`serving`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class Terminated(BaseException):
    """SIGTERM or SIGINT, raised where the main thread happens to be."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def arm_signals() -> None:
    """Have SIGTERM and SIGINT raise `Terminated` in the main thread, once."""

    def end(number: int, _frame: FrameType | None) -> None:
        # Once is enough: a second one while the first unwinds would cut clean-up short.
        ignore_signals()
        raise Terminated(number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


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
