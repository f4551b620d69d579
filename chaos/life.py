"""``python -m phalanx.chaos.life``: the driver of one life; see `lives`."""

from __future__ import annotations

import os
import sys

from .lives import live

if __name__ == "__main__":
    # What the target prints must not come between the lines that the referee reads.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    live(sys.stdin.buffer, answer)
    os._exit(0)  # the thread that listens to the referee may be in the middle of a read
