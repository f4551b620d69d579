"""Starting a process as a new interpreter.

Guarantees: the process is a child of this one; it has the descriptors it was given and no others.

Left to others: waiting for it, and the thread this runs on: the parent-death signal follows it.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from phalanx.supervision import RuntimeFault

from . import executable
from .marks import VARIABLE

if TYPE_CHECKING:
    from .launch_spec import LaunchSpec
    from .marks import WorkerMark


def start_interpreter(spec: LaunchSpec, mark: WorkerMark, file: int, awaits: int) -> int:
    """Return the pid of a new interpreter that becomes what the birth in *file* says."""
    birth = spec.birth(mark)
    fds = [file, awaits, *spec.fds.values()]
    arguments = [",".join(map(str, fds))]
    try:
        popen = subprocess.Popen(
            executable.command("exec_main", arguments, birth.sys_path),
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=spec.stdout,
            stderr=spec.stderr,
            env={**birth.env, VARIABLE: mark.value},
            cwd=birth.cwd,
            start_new_session=spec.new_session,
        )
    except OSError as error:
        msg = f"could not start {spec.label!r}: {error}"
        raise RuntimeFault(msg) from error
    popen.returncode = 0  # Popen keeps out of it: the status is collected by pidfd
    return popen.pid
