"""Large messages while ranks are being killed at any instruction."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from tests.integration.calls.test_large_messages import Keeper

from phalanx.actors import Executor
from phalanx.supervision import Intensity, Strategy, WorkerDied

WAIT = 60.0
KILLS = 25
SIZE = 300_000


def test_no_kill_spoils_a_large_message_or_its_answer(make: Callable[..., Executor[Any]]) -> None:
    intensity = Intensity(10 * KILLS, 600.0)
    executor = make(Keeper, 3, strategy=Strategy.ONE_FOR_ONE, intensity=intensity)
    chance = random.Random(4)
    over = threading.Event()
    outcomes: list[tuple[int, int]] = []  # of each caller: answered, died
    wrong: list[Any] = []

    def call(number: int) -> None:
        answered = died = 0
        kept: list[tuple[int, Any]] = []
        while not over.is_set():
            value = (answered + died + number) % 200
            try:
                replies = executor.collective_rpc(
                    "echo", WAIT, args=(np.full(SIZE, value, np.uint8),)
                )
            except WorkerDied:
                died += 1
                continue
            except BaseException as error:
                wrong.append(error)
                raise
            answered += 1
            kept = [*kept[-5:], *((value, reply) for reply in replies)]
            wrong.extend(value for value, reply in kept if not (reply == value).all())
        outcomes.append((answered, died))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for _ in range(KILLS):
        before = executor.status().restarts
        pid = executor.ranks[chance.randrange(3)].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + WAIT
        while executor.status().restarts == before and time.monotonic() < deadline:
            if executor.status().state == "serving" and pid is None:
                break
            over.wait(0.002)
    over.set()
    for caller in callers:
        caller.join(WAIT)

    assert not wrong
    assert len(outcomes) == 3
    assert sum(answered for answered, _ in outcomes) > 0
    assert executor.collective_rpc("total", WAIT, args=(np.ones(SIZE, np.uint8),)) == [SIZE] * 3
