"""Workers whose state is taken and given back, and whose hooks go wrong where they are told."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.workers import Echo, go_wrong

from phalanx.actors import WorkerContext, method


class Fatal:
    """An answer that kills its worker on its way out: the state has been stored by then."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Counter(Echo):
    """Counts, and says what it was given back.

    Args:
        wrong: What goes wrong, and how: "checkpoint" or "restore" to a word below. It happens
            while the file *when* exists, on rank *where* (None: on all).
    """

    def __init__(
        self, wrong: dict[str, str] | None = None, when: str = "", where: int | None = None
    ) -> None:
        super().__init__()
        self.wrong = wrong or {}
        self.when = when
        self.where = where
        self.restored: list[Any] = []

    def checkpoint(self) -> Any:
        self.go_wrong("checkpoint")
        if self.is_wrong("checkpoint") and self.wrong["checkpoint"] == "unpicklable":
            return threading.Lock()
        return {"count": self.count, "rank": self.ctx.rank}

    def restore(self, state: Any) -> None:
        self.go_wrong("restore")
        assert state["rank"] == self.ctx.rank
        self.count = state["count"]
        self.restored.append(state["count"])

    def add_and_die_answering(self, rank: int) -> Any:
        self.add()
        return Fatal() if self.ctx.rank == rank else None

    def is_wrong(self, hook: str) -> bool:
        return (
            hook in self.wrong
            and self.where in (None, self.ctx.rank)
            and (not self.when or Path(self.when).exists())
        )

    def go_wrong(self, hook: str) -> None:
        if not self.is_wrong(hook):
            return
        how, text = self.wrong[hook], f"{hook} goes wrong"
        if how.endswith("once"):
            Path(self.when).unlink()
            how, text = how.removesuffix("once").strip() or "raise", f"{text} once"
        if how != "unpicklable":
            go_wrong(how, text)

    @method(idempotent=True)
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    def add_and_die(self, rank: int) -> int:
        """Count, and die on *rank*."""
        self.count += 1
        if self.ctx.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.count

    def add_and_raise(self, error: Exception) -> None:
        self.count += 1
        raise error

    def get(self) -> int:
        return self.count

    def state(self) -> tuple[int, list[Any], int]:
        return self.count, self.restored, self.ctx.incarnation


class Announcer(Counter):
    """Says that it is about to restore its state, if that is to go wrong."""

    def restore(self, state: Any) -> None:
        if self.is_wrong("restore"):
            self.ctx.emit("restores")
        super().restore(state)


class Sluggish(Counter):
    """Is not started while *slow* exists, which it says by *begun*."""

    def __init__(self, slow: str, begun: str) -> None:
        super().__init__()
        self.slow, self.begun = Path(slow), Path(begun)

    def on_start(self, ctx: WorkerContext) -> None:
        while self.slow.exists():
            self.begun.touch()
            time.sleep(0.01)


class Resharder(Counter):
    """Shares the count anew among another number of ranks."""

    def reshard(self, states: Sequence[Any]) -> None:
        assert [state["rank"] for state in states] == list(range(len(states)))
        total = sum(state["count"] for state in states)
        self.count = total // self.ctx.world_size
        self.restored.append([state["count"] for state in states])


class KeptCounter(Counter):
    """Is kept when another rank dies."""

    def on_start(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)

    on_reform = on_start


class Colliding(KeptCounter):
    """Finds its process group broken after it has counted, once."""

    def add_and_break(self, marks: str) -> int:
        self.add()
        mark = Path(marks, str(self.ctx.rank))
        if not mark.exists():
            mark.touch()
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
        return self.count


class Bounded(Counter):
    """Cannot write files beyond a size, as on a disk that is full."""

    def fill_disk(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))


class Holder(Echo):
    """Has a large state."""

    def fill(self, number: int, value: float) -> None:
        import torch

        self.tensor = torch.full((number,), value)

    def checkpoint(self) -> Any:
        return {"tensor": self.tensor, "small": self.tensor[:3].clone()}

    def restore(self, state: Any) -> None:
        self.tensor = state["tensor"]
        self.small = state["small"]

    def total(self) -> float:
        return float(self.tensor.double().sum())

    def change(self) -> float:
        self.tensor.add_(1)
        return self.total()
