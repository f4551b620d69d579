"""Launch spec: the description of a process to start.

What it leaves open is taken from the driver at the moment of the start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from phalanx.runtime.linux.process_tree import VARIABLE
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
            moment of the start.
        stdout: A descriptor, or None for the driver's; as *stderr*.
        method: Fork from a zygote, or start a new interpreter (slow, but nothing of a preload
            is in it).
        preload: The modules that the zygote has imported; None for the launcher's own choice.
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

    def complete(self) -> LaunchSpec:
        """Return it with what it leaves open as it is now.

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
        path = tuple(sys.path if self.sys_path is None else self.sys_path)
        return replace(self, env=env, cwd=cwd, sys_path=path)
