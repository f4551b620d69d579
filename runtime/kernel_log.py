"""What the kernel's log says about a process that was killed for want of memory.

Guarantees: an answer names that very process, by a number that means the same to the kernel and to
us; where it cannot be had (no right to read the log, a namespace of numbers of our own) the answer
is None, which says nothing either way.

Left to others: what else speaks for it (`evidence`).

Source: ``/dev/kmsg`` in the kernel's ABI documentation; ``__oom_kill_process`` in its
``mm/oom_kill.c``, which says one line for every process that it kills.
"""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOG: Final = "/dev/kmsg"
_FIRST_NAMESPACE: Final = "pid:[4026531836]"  # a constant of the kernel's interface
_LONGEST: Final = 8192  # bytes; no record is longer
_KILLED: Final = re.compile(r"Killed process (\d+)\b")


def killed_for_memory(pid: int, since: float) -> str | None:
    """Return the log's line on the kill of *pid*; empty where there is none.

    *since* is when the process was started, in seconds on the monotonic clock: a line from before
    is about another one of that number. None where the log cannot tell.
    """
    if not _names_our_processes():
        return None
    found = ""
    earliest = since - _drift()
    try:
        for at, text in _records():
            victim = _KILLED.search(text)
            if victim is not None and int(victim[1]) == pid and at >= earliest:
                found = text
    except OSError:
        return None
    return found


def is_kernel_log_told() -> bool:
    """Whether the log can be read, and means our processes."""
    return _names_our_processes() and os.access(_LOG, os.R_OK)


def _names_our_processes() -> bool:
    """Whether we know processes by the numbers that the kernel logs."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE  # noqa: PTH115 -- no path at all
    return False


def _drift() -> float:
    """Return how far the log's clock, which nobody corrects, may be from ours, in seconds."""
    return 5.0 + time.monotonic() * 0.001


def _records() -> Iterator[tuple[float, str]]:
    """Yield every record that the kernel still has: seconds since boot, and its text."""
    log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(log, _LONGEST)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten as we read; the next one is there
                    continue
                raise
            head, _, rest = record.decode("utf-8", "replace").partition(";")
            stamp = head.split(",")[2:3]
            if stamp and stamp[0].isdigit():
                yield int(stamp[0]) / 1e6, rest.partition("\n")[0]
    finally:
        os.close(log)
