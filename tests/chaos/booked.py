"""A worker that books what it does where a kill cannot undo it, and goes wrong when it is told to.

Every effect is one line, appended in one write to a file that all workers share: what was done is
known whatever became of who did it. An order is a file named after a process (or a rank's next
start); the next call of that process takes it and does as it says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.actors import WorkerActor, WorkerContext

Answer = tuple[str, int, int, int]
"""The call's own token, then rank, incarnation and epoch of who answers."""


class Ordered(Exception):
    """What a call raises when it was told to."""


class UnpicklablyOrdered(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Booked(WorkerActor):
    """Books each call; the first thing it does is to look for an order."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._file = -1

    def on_start(self, ctx: WorkerContext) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self._folder / "effects", flags, 0o600)
        self._obey(f"start-{ctx.rank}")
        self.meet(ctx)

    def meet(self, ctx: WorkerContext) -> None:
        """Join the others, where there is something to join."""

    def work(self, token: str, pause: float = 0.0, load: Any = None) -> tuple[Answer, Any]:
        """What one rank can do alone."""
        self._book("effect", token)
        self._obey(str(os.getpid()))
        if pause:
            time.sleep(pause)
        self._book("ended", token)
        return self._answer(token), load

    def work_together(self, token: str, pause: float = 0.0, load: Any = None) -> tuple[Answer, Any]:
        """What takes all ranks, where they have met."""
        return self.work(token, pause, load)

    def items(self, token: str, count: int) -> Iterator[tuple[Answer, int]]:
        self._book("effect", token)
        for number in range(count):
            if number == 1:
                self._obey(str(os.getpid()))
            yield self._answer(token), number
        self._book("ended", token)

    def _answer(self, token: str) -> Answer:
        return token, self.ctx.rank, self.ctx.incarnation, self.ctx.epoch

    def _book(self, kind: str, what: str) -> None:
        ctx = self.ctx
        line = f"{kind} {what} {ctx.rank} {ctx.incarnation} {ctx.epoch} {os.getpid()}\n"
        os.write(self._file, line.encode())

    def _obey(self, name: str) -> None:
        order = self._folder / "orders" / name
        if not order.exists():
            return
        with contextlib.suppress(FileNotFoundError):  # the giver may have taken it back
            how = order.read_text()
            order.unlink()
            self._book("fault", how)
            getattr(self, f"_{how}")()

    # --- what can be ordered ----------------------------------------------------------------

    def _raise(self) -> None:
        raise Ordered(str(self.ctx.rank))

    def _raise_unpicklable(self) -> None:
        raise UnpicklablyOrdered("cannot travel")

    def _exit(self) -> None:
        os._exit(3)

    def _leave(self) -> None:
        sys.exit(4)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def _stop_self(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _loop(self) -> None:
        while True:
            pass

    def _deadlock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def _hold(self) -> None:
        ctypes.PyDLL(None).sleep(600)  # native, and holds the interpreter lock

    def _shut(self) -> None:
        os.closerange(3, 4096)

    def _spawn(self) -> None:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)

    def _dawdle(self) -> None:
        time.sleep(0.15)  # slow, and within every limit


class BookedTogether(Booked):
    """The same, in a process group; whoever is kept joins the next one."""

    def meet(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)

    def on_reform(self, ctx: WorkerContext) -> None:
        self.meet(ctx)

    def work_together(self, token: str, pause: float = 0.0, load: Any = None) -> tuple[Answer, Any]:
        import torch
        from torch import distributed

        total = torch.ones(1)
        try:
            return super().work_together(token, pause, load)
        finally:  # a rank that raised and did not come would leave the others waiting
            distributed.all_reduce(total)  # pyright: ignore[reportUnknownMemberType]  # torch's gap
            assert float(total) == self.ctx.world_size
