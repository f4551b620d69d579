"""Workers for groups with spares."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.workers import Echo, go_wrong, wait_for


class Warm(Echo):
    """Loads something before it has a rank; *how* says what goes wrong there."""

    def __init__(self, how: str = "", gate: str = "") -> None:
        super().__init__()
        self.how = how
        self.gate = gate
        self.loaded_in: list[int] = []

    def on_standby(self) -> None:
        assert not hasattr(self, "ctx")
        match self.how:
            case "hang":
                wait_for(self.gate, 600)
            case "":
                pass
            case _:
                go_wrong(self.how, "no such weights")
        self.loaded_in.append(os.getpid())

    def loaded(self) -> tuple[list[int], int]:
        return self.loaded_in, os.getpid()

    def world(self) -> dict[str, Any]:
        title = Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode()
        return {**self.who(), "cwd": str(Path.cwd()), "title": title}
