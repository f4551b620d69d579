"""Freezing a process in the kernel: then it is in uninterruptible sleep, and no SIGKILL ends it.

That is what a worker looks like that hangs in a driver or on a dead disk. It takes a control group
(version 1) that we may write to: `Freezer.why_not` says what is in the way where there is none.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path
from typing import Self

from tests.support.processes import wait_until

_ROOT = Path("/sys/fs/cgroup/freezer")


class Freezer:
    """A control group of our own; thawed and removed at the end."""

    def __init__(self) -> None:
        self._folder = _ROOT / f"phalanx-{uuid.uuid4().hex[:8]}"

    @staticmethod
    def why_not() -> str:
        """Return why there can be none, or an empty text."""
        try:
            with Freezer():
                return ""
        except OSError as error:
            return f"no process can be frozen here: {error}"

    def freeze(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN")

    def thaw(self) -> None:
        self._set("THAWED")

    def _set(self, state: str) -> None:
        (self._folder / "freezer.state").write_text(state)
        file = self._folder / "freezer.state"
        wait_until(lambda: file.read_text().strip() == state, state)

    def __enter__(self) -> Self:
        self._folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.thaw()
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (_ROOT / "cgroup.procs").write_text(pid)
        deadline = time.monotonic() + 10.0
        while True:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # whoever was in it is on the way out
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            else:
                return
