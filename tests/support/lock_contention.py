"""Processes that share a lock and are killed while they use it. Run as a program, by the tests.

They change two words under the lock that must be equal outside of it. Whoever hears that the last
holder died makes them equal again. Prints one line of JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time

from phalanx.runtime.memory.shared_lock import SharedLock, create_lock_file


def work(file: int, shared: memoryview, rank: int) -> None:
    lock = SharedLock(file, "pair", rank, 1, None)
    while True:
        with lock as died:
            first, second = shared[0], shared[1]
            if died is not None:
                shared[2] += 1
                shared[0] = shared[1] = max(first, second)
            elif first != second:
                shared[3] += 1
            shared[0] += 1
            if not shared[1] % 8:
                time.sleep(0.001)  # so that some kills strike between the two
            shared[1] += 1
            shared[8 + rank] += 1


def start(file: int, shared: memoryview, rank: int) -> int:
    pid = os.fork()
    if not pid:
        try:
            work(file, shared, rank)
        finally:
            os._exit(1)
    return pid


def main(kills: int, size: int, seed: int) -> None:
    dice = random.Random(seed)
    file = create_lock_file()
    shared = memoryview(mmap.mmap(-1, 4096)).cast("Q")
    pids = {rank: start(file, shared, rank) for rank in range(size)}
    lock = SharedLock(file, "pair", 99, 1, 10.0)
    after: list[int] = []
    for _ in range(kills):
        time.sleep(dice.random() * 0.002)
        inside = None
        if dice.random() < 0.5:
            while (inside := lock.holder()) is None:
                pass
        rank = inside.rank if inside is not None else dice.randrange(size)
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
        before = sum(shared[8 : 8 + size])
        pids[rank] = start(file, shared, rank)
        deadline = time.monotonic() + 20
        while sum(shared[8 : 8 + size]) == before and time.monotonic() < deadline:
            time.sleep(0)
        after.append(sum(shared[8 : 8 + size]) - before)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with lock:
        found = {
            "stuck": sum(count == 0 for count in after),
            "told": shared[2],
            "torn": shared[3],
            "turns": list(shared[8 : 8 + size]),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
