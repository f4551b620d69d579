"""The calls of one run: made with several in flight, taken in order, booked, and shot at.

Guarantees: an embedding is put down under the ticket that came back with it, never under the one
that was expected; a call that fails is noted and the run goes on; a group that gives up ends the
run, with all that it still owes counted as lost.

Left to others: what a call does (the pipelines); whether the result is right (`run`).
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from phalanx import ExecutorClosed, PhalanxError

from .killer import Killer
from .ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch

    from phalanx import Executor

    from .progress import Bar
    from .tokens import Batch

    Answer = Future[tuple[int, torch.Tensor]]

HEAL_TIMEOUT = 60.0
"""Seconds that the last rank killed has to come back, once the work is done."""


class Job:
    """Embeds *work* with *group*.

    Args:
        embed: Makes the call for one batch; its value is the batch's ticket and the embeddings.
        work: The batches.
        vectors: float32, (passages, hidden size): where the embeddings are put down.
        depth: How many calls to keep in flight.
        kills: How many ranks to kill meanwhile.
        seed: For when and whom.

    Attributes:
        seconds: From the first call to the last answer.
        errors: What calls failed with.
    """

    def __init__(
        self,
        group: Executor[Any],
        embed: Callable[[Batch], Answer],
        work: Sequence[Batch],
        vectors: torch.Tensor,
        bar: Bar,
        *,
        depth: int,
        kills: int,
        seed: int,
    ) -> None:
        self.ledger = Ledger()
        self.seconds = 0.0
        self.errors: list[str] = []
        self._embed = embed
        self._work = {batch.ticket: batch for batch in work}
        self._vectors = vectors
        self._bar = bar
        self._depth = depth
        self.killer = Killer(
            group,
            self.ledger,
            calls=len(work),
            depth=depth,
            kills=kills,
            seed=seed,
            note=bar.note,
        )

    def run(self) -> None:
        """Make every call and take every answer; return once all that was killed is back."""
        flying: deque[Answer] = deque()
        began = time.monotonic()
        self.killer.start()
        try:
            for batch in self._work.values():
                if len(flying) == self._depth:
                    self._take(flying.popleft())
                self.ledger.made(batch.ticket)
                try:
                    flying.append(self._embed(batch))
                except ExecutorClosed as error:  # the group has given up: nothing more can be made
                    self.errors.append(str(error))
                    break
            while flying:
                self._take(flying.popleft())
        finally:
            self.seconds = time.monotonic() - began
            self.killer.finish(HEAL_TIMEOUT)

    def _take(self, answer: Answer) -> None:
        try:
            ticket, vectors = answer.result()
        except PhalanxError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return
        self.ledger.answered(ticket)
        batch = self._work[ticket]
        self._vectors[batch.rows] = vectors
        self._bar.advance(len(batch.rows))
