"""``-m benchmarks.training.ours FOLDER``: the driver of our own run, and its ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from benchmarks.training.ranks.model import learn, make
from benchmarks.training.ranks.notes import Asked, Gate, Notes
from phalanx import Runtime
from phalanx.integrations.torch import State, Trainer, Training, replicate

if TYPE_CHECKING:
    from phalanx import WorkerContext
    from phalanx.integrations.torch import Plan


class Protected(Trainer):
    """A rank whose state outlives it."""

    without_state = ("_step", "_began", "_used")

    def __init__(self, plan: Plan, folder: str) -> None:
        super().__init__(plan)
        self._asked = Asked.read(folder)

    def build(self, ctx: WorkerContext) -> State:
        """Make the model."""
        self._notes = Notes(self._asked, ctx.rank)
        self.model, optimizer = make(self._asked)
        return State(model=self.model, optimizer=optimizer)

    def join(self, ctx: WorkerContext) -> None:  # noqa: ARG002
        """Wrap it."""
        self.net = self.model if self.plan.sharded else replicate(self.model)
        self._notes.put("from", self.state.step)

    def train_step(self, step: int) -> None:
        """Learn."""
        self._step, self._began = step, self._notes.put("begin", step)
        self._used, _ = learn(self.net, step, self.ctx.rank, self.ctx.world_size)

    def apply(self) -> None:
        """Note that it was done."""
        super().apply()
        self._notes.put("done", self._step, self._began, *self._used)


def main(folder: str) -> None:
    """Train as asked."""
    asked = Asked.read(folder)
    notes = Notes(asked, -1)
    gate = Gate(asked, 0) if asked.gated else None
    options: dict[str, Any] = {"survivors": asked.survivors, "sharded": asked.sharded}
    options["every"] = asked.every
    with (
        Runtime(console=None, stream=False) as runtime,
        Training(
            Protected, asked.ranks, args=(folder,), threads=1, runtime=runtime, **options
        ) as run,
    ):
        is_last = False
        while not is_last:
            if gate is not None and run.step % asked.block == 0:
                gate.wait()
            next(run.steps(run.step + 1))
            is_last = run.step == asked.digests[-1] if asked.digests else asked.wants_stop()
            if is_last or run.step in asked.digests:
                notes.put("digest", run.step, run.digest())


if __name__ == "__main__":
    main(sys.argv[1])
