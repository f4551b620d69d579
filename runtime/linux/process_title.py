"""Process title, process tag and environment of this process, as other processes see them.

- After `show_title` ``ps`` lists the process under its title.
- After `show_tag` ``/proc/*/environ`` of this process, and the environment of processes that it
  forks or starts, have the new tag.
- `adopt` gives an existing process the title, tag and environment of a new one.

A forked process keeps the arguments and the environment of the program that it was forked from in
the memory that the kernel shows, so both are overwritten in place: setting ``os.environ`` changes
what *exec'ed* children inherit only. The arguments must be long enough for the title, and the tag
as long as the one before.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import procfs, syscalls
from .process_tree import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping


def adopt(env: Mapping[str, str], cwd: str | None, title: str, tag: str = "") -> None:
    """Have this environment but for the tag, working directory, title and tag from now on.

    None for *cwd*, an empty *title* and an empty *tag* keep what there is. The folder for temporary
    files is that of the environment.
    """
    import tempfile  # noqa: PLC0415  # the guardian does without

    zone, old = os.environ.get("TZ"), os.environ.get(VARIABLE, "")
    os.environ.clear()
    os.environ.update({**env, VARIABLE: old})
    if os.environ.get("TZ") != zone:
        time.tzset()
    if tag:
        show_tag(tag)
    show_title(title)
    if cwd is not None:
        os.chdir(cwd)
    tempfile.tempdir = _temporary_folder()


def _temporary_folder() -> str | None:
    """Return the folder for temporary files, as of the environment; None: Python shall find it.

    Python tries each candidate with a file, which stays if the process is killed at that moment.
    (The import of torch's compiler at the first step of an optimizer has it do so.)
    """
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for name in filter(None, (*named, "/tmp")):  # noqa: S108
        folder = Path(name).absolute()
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return str(folder)
    return None


def show_title(title: str) -> None:
    """Have ``ps`` show *title*, cut to the room that there is."""
    start, end, *_ = _areas()
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
    *_, start, end = _areas()
    key = f"{VARIABLE}=".encode()
    before, found, value = (b"\0" + Path("/proc/self/environ").read_bytes()).partition(b"\0" + key)
    at = start + len(before) + len(key)
    if found and value.find(b"\0") == len(tag) and at + len(tag) <= end:
        syscalls.overwrite(at, tag.encode())
    os.environ[VARIABLE] = tag


def _areas() -> tuple[int, ...]:
    """Return where the arguments and the environment begin and end."""
    return tuple(map(int, procfs.stat_fields("/proc/self")[45:49]))
