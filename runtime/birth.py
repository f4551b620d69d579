"""What a new process is told, and how it becomes what it was told to be.

Guarantees: environment, working directory, import path, output and descriptors are those of the
spec and of the moment of the start, whichever way the process was made; it dies with the driver;
it holds no descriptor of its siblings; signals are as in a fresh Python.

Left to others: making the process (`zygote_main` by fork, `exec_main` by exec), and what it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import descriptors, imprint, kernel, tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

LOST = 113  # exit code of a process whose driver had gone before it was armed to follow it


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What a new process is told.

    Attributes:
        driver: The pid its parent must have, for otherwise the driver is gone.
        names: The names of its own descriptors, in the order in which they are passed.
        cwd: None where the process already is where it shall be.
        files: The soft limit of open descriptors.
    """

    driver: int
    entry: str
    payload: bytes
    names: tuple[str, ...]
    mark: str
    title: str
    env: dict[str, str]
    cwd: str | None
    sys_path: tuple[str, ...]
    files: int

    def to_file(self) -> int:
        """Return the descriptor of an anonymous file that holds it."""
        fd = os.memfd_create("phalanx-birth", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                pickle.dump({name: getattr(self, name) for name in self.__slots__}, file)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @classmethod
    def from_file(cls, fd: int) -> Birth:
        """Read one from a file made by `to_file`, and close it."""
        try:
            # Not from where the file stands: a start that was begun anew shares its position.
            with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
                return cls(**pickle.loads(content))
        finally:
            os.close(fd)


def await_go(pipe: int) -> None:
    """Wait until the driver says go; end this process where the driver ends instead.

    Until then nothing has happened here that anybody could see: the driver may still kill this
    process and start another in its place.
    """
    if os.read(pipe, 1) != b"g":
        os._exit(LOST)
    os.close(pipe)


def live(birth: Birth, fds: Mapping[str, int]) -> Any:
    """Become what *birth* says, run its entry and return what that returns."""
    kernel.die_with_parent()
    if os.getppid() != birth.driver:
        os._exit(LOST)
    _reset_signals()
    descriptors.set_limit(birth.files)
    imprint.show_title(birth.title)
    zone = os.environ.get("TZ")
    os.environ.clear()
    os.environ.update(birth.env)
    imprint.show_mark(birth.mark)
    if os.environ.get("TZ") != zone:
        time.tzset()
    if birth.cwd is not None:
        os.chdir(birth.cwd)
    sys.path[:] = birth.sys_path
    importlib.invalidate_caches()
    module, _, name = birth.entry.partition(":")
    return getattr(importlib.import_module(module), name)(birth.payload, fds)


def close_all_but(keep: Iterable[int]) -> None:
    """Close every descriptor that is not in *keep*."""
    spared = {*keep, 0, 1, 2}
    for fd in tree.numbers_in("/proc/self/fd"):
        if fd not in spared:
            with contextlib.suppress(OSError):  # the listing's own is closed already
                os.close(fd)


def _reset_signals() -> None:
    # An ignored signal stays ignored through fork and exec: with SIGCHLD ignored in the driver,
    # no worker could wait for its own children.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
