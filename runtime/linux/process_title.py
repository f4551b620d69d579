"""What the rest of the machine sees of this process: its title and its mark.

Guarantees: after `show_title` the process is listed by ``ps`` under its title; after `show_mark`
everything that looks at its environment from outside, and everything forked from it, has the new
mark.

Left to others: starting it with arguments long enough for the title and a mark of the right
length. A forked process keeps the arguments and the environment of the program it was forked from
in the memory the kernel shows, so both are written over in place; setting ``os.environ`` alone
changes what *exec'ed* children inherit, not what is shown.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import syscalls
from .process_tree import VARIABLE


def show_title(title: str) -> None:
    """Have ``ps`` show *title*; what is too long for the room there is cut."""
    start, end, _, _ = _areas()
    room = end - start
    if not title or room < 2:
        return
    # The kernel takes a last byte that is not zero for a sign that this is a title, and shows it
    # up to its first zero byte. Otherwise it would show all of the padding.
    text = title.encode()[: room - 2]
    syscalls.overwrite(start, text + bytes(room - len(text) - 1) + b".")
    Path("/proc/self/comm").write_bytes(text[:15])


def show_mark(mark: str) -> None:
    """Put *mark* into the environment, for children and for onlookers."""
    _, _, start, end = _areas()
    shown = Path("/proc/self/environ").read_bytes()
    key = f"{VARIABLE}=".encode()
    at = 0 if shown.startswith(key) else shown.find(b"\0" + key) + 1
    if shown.startswith(key) or at > 0:
        length = shown.index(b"\0", at) - at - len(key)
        text = mark.encode()
        if len(text) == length and start + at + len(key) + length <= end:
            syscalls.overwrite(start + at + len(key), text)
    os.environ[VARIABLE] = mark


def _areas() -> tuple[int, int, int, int]:
    """Return where the arguments and the environment begin and end."""
    stat = Path("/proc/self/stat").read_bytes()
    fields = stat[stat.rindex(b")") + 2 :].split()
    argument_start, argument_end, environ_start, environ_end = map(int, fields[45:49])
    return argument_start, argument_end, environ_start, environ_end
