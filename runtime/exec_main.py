"""The first lines of a process started by exec: read what it is told, become it.

Guarantees: the same as a fork from the zygote, in a new interpreter, so that nothing a preload
left behind (threads, a CUDA context) is in it.

Left to others: the command line and the descriptors (`executable`).
"""

from __future__ import annotations

import sys

from .birth import Birth, await_go, live


def main() -> None:
    """Run; the argument lists the birth's file, the pipe that says go, and its descriptors."""
    file, go, *numbers = (int(number) for number in sys.argv[1].split(","))
    del sys.argv[1:]
    await_go(go)
    birth = Birth.from_file(file)
    sys.exit(live(birth, dict(zip(birth.names, numbers, strict=True))))
