"""`LaunchSpec` of a process, and the child bootstrap, which applies it and calls the entry point.

- Environment, working directory, import path, output and descriptors are those of the spec and of
  the moment of the start, whether the process was forked or executed.
- It dies with the driver, holds no descriptor of its siblings, and has a fresh Python's signals.
- A death at any moment leaves no temporary file that Python itself has made.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from phalanx.runtime.linux import descriptor_limit, descriptors, process_title, syscalls
from phalanx.runtime.linux.process_tree import VARIABLE
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


LOST = 113  # exit code of a process whose driver had gone before it was armed to follow it


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One process to start.

    Attributes:
        entry: ``module:function``; called in the new process with *payload* and its descriptors
            by name; what it returns is the exit code, None is 0.
        fds: The driver's descriptors by name; the process gets its own copies.
        label: Its name in marks, events and reports.
        title: What ``ps`` shows.
        env: The complete environment; None, as for *cwd* and *sys_path*, is the driver's at the
            moment of the start; an import path that was asked for comes first.
        stdout: A descriptor, or None for the driver's; as *stderr*.
        method: Fork from a zygote, or start a new interpreter (slow, but nothing of a preload
            is in it).
        preload: The modules that the zygote has imported; None for the launcher's own choice.
        asked_env: Of *env* what was asked for, where the rest is the driver's. What of it is read
            only as a program starts the zygote was started with.
    """

    entry: str
    payload: bytes = b""
    fds: Mapping[str, int] = field(default_factory=dict[str, int])
    label: str = ""
    title: str = ""
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    sys_path: Sequence[str] | None = None
    stdout: int | None = None
    stderr: int | None = None
    method: Literal["zygote", "exec"] = "zygote"
    preload: Sequence[str] | None = None
    asked_env: Mapping[str, str] = field(default_factory=dict[str, str])

    def complete(self) -> LaunchSpec:
        """Return it, for the process itself, with what it leaves open as it is now.

        *cwd* stays None if the driver's own was removed: the process stays where it is made.
        """
        cwd = self.cwd
        if cwd is None:
            with contextlib.suppress(FileNotFoundError):
                cwd = str(Path.cwd())
        elif not Path(cwd).is_dir():
            raise SpecError("cwd", cwd, "name a directory that exists")
        env = dict(os.environ if self.env is None else self.env)
        env.pop(VARIABLE, None)
        path = import_path(self.asked_env) if self.sys_path is None else tuple(self.sys_path)
        return replace(self, env=env, cwd=cwd, sys_path=path, asked_env={})


def import_path(asked_env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the driver's import path, behind what ``PYTHONPATH`` in *asked_env* adds to it."""
    given = filter(None, asked_env.get("PYTHONPATH", "").split(os.pathsep))
    folders = [str(Path(each).absolute()) for each in given]  # as Python itself does
    return (*[each for each in folders if each not in sys.path], *sys.path)


class ChildStart(NamedTuple):
    """The file from which a new process reads its start.

    Attributes:
        driver: The pid that its parent must have: otherwise the driver has exited.
        tag: The value of its process tag.
        files: The soft limit of open descriptors.
    """

    spec: LaunchSpec
    driver: int
    tag: str
    files: int

    def to_file(self) -> int:
        """Return the descriptor of an anonymous file that holds it."""
        fd = os.memfd_create("phalanx-start", os.MFD_CLOEXEC)
        with descriptors.closed_on_error(fd), open(fd, "wb", closefd=False) as file:
            pickle.dump(tuple(self), file)
        return fd

    @classmethod
    def from_file(cls, fd: int) -> ChildStart:
        """Read one from a file made by `to_file`, and close it."""
        try:
            # Mapped, not read: a launch that is tried again shares the file offset.
            with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
                return cls(*pickle.loads(content))
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


def live(start: ChildStart, fds: Iterable[int]) -> Any:
    """Become what *start* says, run its entry and return what that returns.

    Args:
        fds: The descriptors of its spec, in the order there.
    """
    spec = start.spec
    syscalls.die_with_parent()
    if os.getppid() != start.driver:
        os._exit(LOST)
    # An ignored signal stays ignored through fork and exec: with SIGCHLD ignored in the driver,
    # no worker could wait for its own children.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor_limit.set_limit(start.files)
    process_title.adopt(spec.env or {}, spec.cwd, spec.title, start.tag)
    sys.path[:] = spec.sys_path or ()
    importlib.invalidate_caches()
    module, _, name = spec.entry.partition(":")
    entry = getattr(importlib.import_module(module), name)
    return entry(spec.payload, dict(zip(spec.fds, fds, strict=True)))


def main() -> None:
    """Run; the argument lists the start's file, the pipe that says go, and its descriptors."""
    file, go, *numbers = (int(number) for number in sys.argv[1].split(","))
    del sys.argv[1:]
    await_go(go)
    sys.exit(live(ChildStart.from_file(file), numbers))
