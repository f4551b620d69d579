"""New Python interpreters that run a part of phalanx: their command lines, and their start.

- The interpreter is this one, with its options that affect the meaning of code; it finds phalanx
  where this process found it.
- The command line is long enough to be overwritten by a title.
- A start that fails leaves no process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime.linux import descriptors
from phalanx.runtime.linux.process_tree import VARIABLE
from phalanx.supervision import RuntimeFault

from .child_process import Process

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from phalanx.runtime.threads.event_loop import EventLoop

    from .zygote_client import StartRequest


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
    "from {module} import main; main()"
)
# The folder under another package name: only the few modules that are needed are imported, and
# none of the faces, which would make a process of a few megabytes one of fifty.
_BARE_BOOT = (
    "import sys, types; package = types.ModuleType('phalanx_bare'); "
    "package.__path__ = [sys.argv.pop(1)]; sys.modules['phalanx_bare'] = package; "
    "from phalanx_bare.{module} import main; main()"
)
_ROOM = "." * 120


def command(module: str, sys_path: Sequence[str]) -> list[str]:
    """Return the command that runs *module*'s ``main`` with *sys_path* as its import path."""
    options = [flag for name, flag in _FLAGS.items() for _ in range(getattr(sys.flags, name))]
    options += [f"-W{option}" for option in sys.warnoptions]
    options += [
        f"-X{name}" if value is True else f"-X{name}={value}"
        for name, value in getattr(sys, "_xoptions").items()  # noqa: B009  # documented, but private
    ]
    boot = _BOOT.format(module=module)
    return [sys.executable, *options, "-c", boot, str(len(sys_path)), *sys_path]


def bare_command(module: str) -> list[str]:
    """Return the command that runs *module*, which needs nothing but the standard library."""
    folder = str(Path(__file__).parents[1] / "linux")
    return [sys.executable, "-I", "-S", "-c", _BARE_BOOT.format(module=module), folder]


def start(what: str, command: list[str], **options: Any) -> tuple[int, int]:
    """Return the pid and a pidfd of a process that runs *command*; *options* are `Popen`'s.

    Raises:
        RuntimeFault: the machine would not start it.
    """
    if not sys.executable:
        raise RuntimeFault("sys.executable is empty: set it to the Python that workers are to run")
    popen = None
    try:
        popen = subprocess.Popen([*command, _ROOM], **options)
        pidfd = descriptors.own(os.pidfd_open(popen.pid))
    except OSError as error:
        if popen is not None:
            popen.kill()
            popen.wait()
        raise RuntimeFault(f"{what} could not be started: {error}") from error
    popen.returncode = 0  # Popen keeps out of it: the status is collected by pidfd
    return popen.pid, pidfd


def start_helper(
    loop: EventLoop,
    label: str,
    command: list[str],
    arguments: list[str],
    *,
    control: socket.socket,
    on_exit: Callable[[Process], None],
    **options: Any,
) -> Process:
    """Start *command*; its arguments are *control*, a pidfd of this process, and *arguments*."""
    with os.fdopen(os.pidfd_open(os.getpid()), "rb") as driver:
        fds = (control.fileno(), driver.fileno())
        pid, pidfd = start(
            f"the {label}",
            [*command, *map(str, fds), *arguments],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
    try:
        return Process(loop, pid, pidfd, label=label, on_exit=on_exit)
    except BaseException:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # SIGCHLD is ignored
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        descriptors.close(pidfd)
        raise


def start_interpreter(request: StartRequest) -> tuple[int, int]:
    """Return pid and pidfd of a new interpreter that becomes what *request* says."""
    spec, tag = request.spec, request.tag
    fds = [request.file, request.awaits, *spec.fds.values()]
    main = command("phalanx.runtime.process.child_main", spec.sys_path or ())
    return start(
        repr(spec.label),
        [*main, ",".join(map(str, fds))],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=spec.stdout,
        stderr=spec.stderr,
        env={**(spec.env or {}), VARIABLE: tag.value},
        cwd=spec.cwd,
        start_new_session=True,
    )
