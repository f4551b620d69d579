"""Process title and process tag, overwritten in the process's own memory.

- After `show_title` ``ps`` lists the process under its title.
- After `show_tag` ``/proc/*/environ`` of this process, and the environment of what is forked from
  it or started by it, have the new tag.

A forked process keeps the arguments and the environment of the program that it was forked from in
the memory that the kernel shows, so both are overwritten in place: setting ``os.environ`` changes
what *exec'ed* children inherit only. The arguments must be long enough for the title, and the tag
as long as the one before.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import procfs, syscalls
from .process_tree import VARIABLE


def show_title(title: str) -> None:
    """Have ``ps`` show *title*, cut to the room that there is."""
    start, end, _, _ = _areas()
    room = end - start
    if not title or room < 2:
        return
    # If the last byte is not zero the kernel takes this for a title, and shows it up to its first
    # zero byte. Otherwise it would show all of the padding.
    text = title.encode()[: room - 2]
    syscalls.overwrite(start, text + bytes(room - len(text) - 1) + b".")
    Path("/proc/self/comm").write_bytes(text[:15])


def show_tag(tag: str) -> None:
    """Put *tag* into the environment, for children and for other processes to see."""
    _, _, start, end = _areas()
    shown = Path("/proc/self/environ").read_bytes()
    key = f"{VARIABLE}=".encode()
    at = 0 if shown.startswith(key) else shown.find(b"\0" + key) + 1
    if shown.startswith(key) or at > 0:
        length = shown.index(b"\0", at) - at - len(key)
        text = tag.encode()
        if len(text) == length and start + at + len(key) + length <= end:
            syscalls.overwrite(start + at + len(key), text)
    os.environ[VARIABLE] = tag


def _areas() -> tuple[int, int, int, int]:
    """Return where the arguments and the environment begin and end."""
    argument_start, argument_end, environ_start, environ_end = map(
        int, procfs.stat_fields("/proc/self")[45:49]
    )
    return argument_start, argument_end, environ_start, environ_end
