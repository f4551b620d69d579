"""A worker each of whose hooks goes wrong, in any way there is, once it is told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.workers import Echo, go_wrong

from phalanx.actors import WorkerContext
from phalanx.supervision import ExitReason


class Fickle(Echo):
    """Counts calls, and keeps that count.

    Args:
        hook: Which hook goes wrong, on rank 0.
        how: In which way.
        when: It does so while this file exists, which it removes first: once.
    """

    def __init__(self, hook: str, how: str, when: str) -> None:
        super().__init__()
        self.hook = hook
        self.how = how
        self.when = Path(when)

    def on_start(self, ctx: WorkerContext) -> None:
        if self.hook == "on_failure" and ctx.rank == 0 and self.when.exists():
            raise ValueError("the first thing that went wrong")
        self.falter("on_start", ctx.rank)

    def on_standby(self) -> None:
        self.falter("on_standby", 0)

    def on_reform(self, ctx: WorkerContext) -> None:
        self.falter("on_reform", ctx.rank)

    def on_stop(self, reason: ExitReason) -> None:
        self.falter("on_stop", self.ctx.rank)

    def on_failure(self, error: BaseException) -> None:
        self.falter("on_failure", self.ctx.rank)

    def checkpoint(self) -> int:
        self.falter("checkpoint", self.ctx.rank)
        return self.count

    def restore(self, state: Any) -> None:
        self.falter("restore", self.ctx.rank)
        self.count = state

    def falter(self, hook: str, rank: int) -> None:
        if hook != self.hook or rank != 0:
            return
        try:
            self.when.unlink()
        except FileNotFoundError:
            return
        go_wrong(self.how, "it went wrong")
