"""The process beside a contestant that kills it, with all that it started, if its driver is killed.

A contestant that runs sees by its standard input that the driver is gone; one that is stopped, as
they are between their turns, does not. ``python -S -E orphan_watch.py VARIABLE=VALUE``: they are
those that have this in their environment. Its own standard input ends with the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_EXIT_TIMEOUT = 10.0


def main() -> None:
    """Wait for the end of the driver; kill all."""
    tag = b"\0" + sys.argv[1].encode() + b"\0"
    sys.stdin.buffer.read()
    until = time.monotonic() + _EXIT_TIMEOUT
    while _kill_all(tag) and time.monotonic() < until:  # one may just have started another
        time.sleep(0.01)


def _kill_all(tag: bytes) -> int:
    """Return how many there were; those that have ended have no environment."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                process = os.pidfd_open(int(entry.name))  # before a look: a number is used again
                try:
                    if tag in b"\0" + (entry / "environ").read_bytes():
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                        found += 1
                finally:
                    os.close(process)
    return found


if __name__ == "__main__":
    main()
