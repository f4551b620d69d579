"""What a subcommand prints, where whoever reads it may leave.

Guarantees: a reader that has enough (``| head``) ends the output without a complaint.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def reader_may_leave() -> Generator[None]:
    """Print in here; what is printed is out on leaving."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain again as it closes its stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
