"""Child bootstrap: the first steps of a started process, up to its entry point.

- Environment, working directory, import path, output and descriptors are those of the spec and of
  the moment of the start, whether the process was forked or executed.
- It dies with the driver, holds no descriptor of its siblings, and has a fresh Python's signals.
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

from phalanx.runtime.linux import descriptor_limit, process_title, procfs, syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


LOST = 113  # exit code of a process whose driver had gone before it was armed to follow it


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """A launch spec in the form in which the new process reads it.

    Attributes:
        driver: The pid that its parent must have: otherwise the driver has exited.
        names: The names of its own descriptors, in the order in which they are passed.
        cwd: None if it is to stay in the directory in which it is made.
        files: The soft limit of open descriptors.
    """

    driver: int
    entry: str
    payload: bytes
    names: tuple[str, ...]
    tag: str
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
            # Mapped, not read: a launch that is tried again shares the file offset.
            with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
                return cls(**pickle.loads(content))
        finally:
            os.close(fd)


def await_go(pipe: int) -> None:
    """Wait until the driver releases this process; exit if the driver exits instead.

    Until then nothing has happened here that can be observed: the driver may still kill this
    process and start another in its place.
    """
    if os.read(pipe, 1) != b"g":
        os._exit(LOST)
    os.close(pipe)


def live(birth: Birth, fds: Mapping[str, int]) -> Any:
    """Become what *birth* says, run its entry and return what that returns."""
    syscalls.die_with_parent()
    if os.getppid() != birth.driver:
        os._exit(LOST)
    _reset_signals()
    descriptor_limit.set_limit(birth.files)
    process_title.show_title(birth.title)
    zone = os.environ.get("TZ")
    os.environ.clear()
    os.environ.update(birth.env)
    process_title.show_tag(birth.tag)
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
    for fd in procfs.numbers_in("/proc/self/fd"):
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


def main() -> None:
    """Run; the argument lists the birth's file, the pipe that says go, and its descriptors."""
    file, go, *numbers = (int(number) for number in sys.argv[1].split(","))
    del sys.argv[1:]
    await_go(go)
    birth = Birth.from_file(file)
    sys.exit(live(birth, dict(zip(birth.names, numbers, strict=True))))
