"""Records a terminal in which ranks of a real program are killed, as ``docs/demo.svg``.

``python docs/record_demo.py`` runs the program of `make demo`, with two kills, in a pseudo-terminal
and draws what it has shown there in the end.
"""  # noqa: INP001 # a script

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ["examples/tensor_parallel.py", "--ranks", "4", "--kills", "2"]
WIDTH = 100  # columns; longer lines are cut
TARGET = Path(__file__).with_name("demo.svg")


def record() -> str:
    """Return all that the command has written to its terminal.

    Raises:
        SystemExit: it has failed.
    """
    pieces: list[bytes] = []

    def read(terminal: int) -> bytes:
        pieces.append(os.read(terminal, 1 << 16))
        return pieces[-1]

    status = pty.spawn([sys.executable, *COMMAND], read)
    if status:
        raise SystemExit(f"the program has failed: {os.waitstatus_to_exitcode(status)}")
    return b"".join(pieces).decode()


def main() -> None:
    """Draw the recording."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in record().split("\n")]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text(f"$ python {' '.join(COMMAND)}", style="bold"))
    for line in lines:
        console.print(Text.from_ansi(line), overflow="ellipsis", no_wrap=True)
    TARGET.write_text(console.export_svg(title="four ranks, two of them killed at work"))


if __name__ == "__main__":
    main()
