"""New Python interpreters that run a part of phalanx: their command lines, and their start.

- The interpreter is this one, with the options that change what code means; it finds phalanx where
  this process found it.
- The command line is long enough to be overwritten by a title.
- A start that fails leaves no process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime.linux import descriptors
from phalanx.runtime.linux.process_tree import VARIABLE
from phalanx.supervision import RuntimeFault

from .process import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from phalanx.runtime.threads.event_loop import EventLoop

    from .zygote import StartRequest


_FLAGS = {
    "optimize": "-O",
    "dont_write_bytecode": "-B",
    "no_user_site": "-s",
    "ignore_environment": "-E",
    "no_site": "-S",
    "bytes_warning": "-b",
}
_BOOT = (
    "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; del sys.argv[1:end]; "
    "from phalanx.runtime.{module} import main; main()"
)
# The folder under another package name: only the few modules that are needed are imported, and
# none of the faces, which would make a process of a few megabytes one of fifty.
_BARE_BOOT = (
    "import sys, types; package = types.ModuleType('phalanx_bare'); "
    "package.__path__ = [sys.argv.pop(1)]; sys.modules['phalanx_bare'] = package; "
    "from phalanx_bare.{module} import main; main()"
)
_ROOM = "." * 120


def command(module: str, arguments: list[str], sys_path: tuple[str, ...]) -> list[str]:
    """Return the command that runs *module*'s ``main`` with *sys_path* as its import path."""
    boot = _BOOT.format(module=module)
    path = str(len(sys_path)), *sys_path
    return [_python(), *_options(), "-c", boot, *path, *arguments, _ROOM]


def bare_command(module: str, arguments: list[str]) -> list[str]:
    """Return the command that runs *module*, which needs nothing but the standard library."""
    boot = _BARE_BOOT.format(module=module)
    return [
        _python(),
        "-I",
        "-S",
        "-c",
        boot,
        str(Path(__file__).parents[1] / "linux"),
        *arguments,
        _ROOM,
    ]


def start(what: str, command: list[str], **options: Any) -> tuple[int, int]:
    """Return the pid and a pidfd of a process that runs *command*; *options* are `Popen`'s.

    Raises:
        RuntimeFault: the machine would not start it.
    """
    popen = None
    try:
        popen = subprocess.Popen(command, **options)
        pidfd = descriptors.own(os.pidfd_open(popen.pid))
    except OSError as error:
        if popen is not None:
            popen.kill()
            popen.wait()
        msg = f"{what} could not be started: {error}"
        raise RuntimeFault(msg) from error
    popen.returncode = 0  # Popen keeps out of it: the status is collected by pidfd
    return popen.pid, pidfd


def start_process(
    loop: EventLoop,
    label: str,
    command: list[str],
    on_exit: Callable[[Process], None],
    **options: Any,
) -> Process:
    """Start *command* as `start` does, and return the process."""
    pid, pidfd = start(f"the {label}", command, **options)
    try:
        return Process(loop, pid, pidfd, label=label, on_exit=on_exit)
    except BaseException:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        descriptors.close(pidfd)
        raise


def _python() -> str:
    if not sys.executable:
        msg = "sys.executable is empty: set it to the Python that workers are to run"
        raise RuntimeFault(msg)
    return sys.executable


def _options() -> list[str]:
    options = [flag for name, flag in _FLAGS.items() for _ in range(getattr(sys.flags, name))]
    options += [f"-W{option}" for option in sys.warnoptions]
    return options + [
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in getattr(sys, "_xoptions").items()  # noqa: B009  # documented, but private
    ]


def start_interpreters(loop: EventLoop, requests: Iterable[StartRequest], deadline: float) -> None:
    """Start all of *requests*, one after the other.

    Raises:
        RuntimeFault: the machine would not start one, or not by *deadline* (monotonic).
    """
    for request in requests:
        # The parent-death signal follows the thread that started a process, not its process: the
        # caller's thread may end any time.
        request.pid, request.pidfd = loop.call(partial(_start, request))
        request.state = "reparented"
        if time.monotonic() > deadline:
            msg = f"could not start {request.spec.label!r} before the deadline"
            raise RuntimeFault(msg)


def _start(request: StartRequest) -> tuple[int, int]:
    """Return pid and pidfd of a new interpreter that becomes what the request's birth says."""
    spec, tag = request.spec, request.tag
    birth = spec.birth(tag)
    fds = [request.file, request.awaits, *spec.fds.values()]
    return start(
        repr(spec.label),
        command("process.child_main", [",".join(map(str, fds))], birth.sys_path),
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=spec.stdout,
        stderr=spec.stderr,
        env={**birth.env, VARIABLE: tag.value},
        cwd=birth.cwd,
        start_new_session=spec.new_session,
    )
