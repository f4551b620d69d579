"""Where a subcommand prints to: terminals, pipes and files of any encoding.

Guarantees: whatever text users and workers have made is printed somehow, whatever the encoding; a
reader that has enough (``| head``) ends the output without a complaint.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Generator

ESCAPED: Final = "backslashreplace"
"""What becomes of text that an encoding lacks: an error in ``open`` would hide all the rest."""


@contextmanager
def whatever_the_encoding() -> Generator[None]:
    """In here stdout and stderr escape what their encoding lacks, and are there."""
    if sys.stdout is None:  # closed by whoever started us; sys.stderr may be None, for print
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # stays, as Python's own would
    with ExitStack() as before:
        streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
        for stream in streams:
            if hasattr(stream, "reconfigure"):  # not where somebody has put something else
                before.callback(_set_errors, stream, stream.errors)
                _set_errors(stream, ESCAPED)
        yield


def _set_errors(stream: Any, errors: str | None) -> None:
    # It flushes first. What cannot be written is Python's to tell, as ever, when it ends.
    with suppress(OSError, ValueError):
        stream.reconfigure(errors=errors)


@contextmanager
def reader_may_leave() -> Generator[None]:
    """Print in here; what is printed is out on leaving."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain again as it closes its stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
