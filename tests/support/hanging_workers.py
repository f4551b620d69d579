"""Workers that hang, each in a way of its own."""

from __future__ import annotations

import _thread
import ctypes
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.survivors import Keeper
from tests.support.workers import Echo, wait_for

from phalanx.actors import WorkerContext, method


class Stuck(Echo):
    """Hangs as it is told, after it has said so."""

    def hang(self, how: str, mark: str | None = None, rank: int = 0) -> None:
        if self.ctx.rank != rank or self.ctx.incarnation > 1:
            return
        if mark is not None:
            Path(mark).touch()
        getattr(self, f"_{how}")()

    def _deadlock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def _loop(self) -> None:
        while True:
            pass

    def _contended(self) -> None:
        for _ in range(3):  # which have the interpreter lock for most of the time
            _thread.start_new_thread(self._loop, ())  # which does not wait for it to run
        while True:
            pass

    def _native(self) -> None:
        ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock: no Python code runs

    def _released(self) -> None:
        ctypes.CDLL(None).sleep(600)

    def _regex(self) -> None:
        re.match(r"(a+)+$", "a" * 64 + "b")  # never ends, and holds the interpreter lock

    def _uninterruptible(self) -> None:
        # A parent sleeps uninterruptibly until its vforked child ends: it handles no signal.
        libc = ctypes.PyDLL(None)
        if libc.vfork() == 0:
            while True:
                libc.sleep(600)

    def _deaf(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.SIGRTMAX + 1))
        time.sleep(600)

    def _blocked_thread(self) -> None:
        thread = threading.Thread(target=self._deadlock, name="the-other")
        thread.start()
        thread.join()

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600.0)  # it is made to go on for its stacks, and must not answer then

    def stop_until(self, gate: str) -> str:
        """Be stopped by a child that lets us go on when *gate* is there."""
        pid = os.getpid()
        if os.fork() == 0:
            os.kill(pid, signal.SIGSTOP)
            wait_for(gate)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        time.sleep(0.01)
        return "went on"

    def hold_lock(self, seconds: int) -> str:
        ctypes.PyDLL(None).sleep(seconds)
        return "done"

    def big(self, gate: str, size: int) -> bytes:
        wait_for(gate)
        return bytes(size)

    def slowly(self, count: int, stuck_at: int = -1) -> Iterator[int]:
        for number in range(count):
            if number == stuck_at:
                self._deadlock()
            yield number

    @method(hang_after=0.3)
    def limited(self, gate: str) -> Any:
        wait_for(gate)

    @method(hang_after=math.inf)
    def unlimited(self, gate: str) -> str:
        wait_for(gate)
        return "done"


class StopsInStart(Echo):
    """Its second incarnation stops in its start."""

    def on_start(self, ctx: WorkerContext) -> None:
        if ctx.incarnation == 2:
            os.kill(os.getpid(), signal.SIGSTOP)


class StuckTogether(Stuck, Keeper):
    """Hangs while the others wait for it in a collective operation."""

    together = Keeper.total

    def hang_together(self, how: str, rank: int) -> float:
        self.hang(how, rank=rank)
        return self.together()
