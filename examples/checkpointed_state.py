"""Workers with state: they count words, are killed again and again, and count no word twice.

With a folder as its argument a later run resumes from the state of the one before it.

    python examples/checkpointed_state.py [FOLDER]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

from phalanx import CheckpointPolicy, Executor, Intensity, Launch, WorkerActor, method
from phalanx.errors import SpecError

with contextlib.redirect_stdout(io.StringIO()) as zen:  # importing it prints the Zen of Python
    import this as _  # noqa: F401
TEXT = zen.getvalue()


class Counter(WorkerActor):
    """Counts its share of the words that it is given, line by line."""

    def __init__(self) -> None:
        self._words: collections.Counter[str] = collections.Counter()
        self._lines = 0

    def checkpoint(self) -> tuple[int, dict[str, int]]:
        """Return what there is to lose; stored before the call is answered."""
        return self._lines, dict(self._words)

    def restore(self, state: tuple[int, dict[str, int]]) -> None:
        """Go on from there, as a new process."""
        self._lines, words = state
        self._words.update(words)

    @method(idempotent=True)  # a death sends the call again; the state is that before the call
    def count(self, line: str) -> int:
        """Count the words of *line* that are this rank's; return how many lines that makes."""
        mine = (word for word in line.lower().split() if len(word) % 2 == self.ctx.rank)
        self._words.update(mine)
        self._lines += 1
        return self._lines

    def result(self) -> tuple[int, dict[str, int]]:
        """Return the number of lines, and the words."""
        return self._lines, dict(self._words)


def main() -> int:
    """Count; return 0 if every word was counted once."""
    parser = argparse.ArgumentParser(description="Count words while the workers are killed.")
    parser.add_argument("folder", nargs="?", type=Path, help="of the state, for a later run")
    folder: Path | None = parser.parse_args().folder
    lines = TEXT.splitlines() * 10
    with tempfile.TemporaryDirectory() as temporary:
        policy = CheckpointPolicy(every_calls=1, where=folder or temporary, resume=True)
        try:
            group = Executor(
                Counter,
                2,
                launch=Launch(preload=()),
                checkpoint=policy,
                intensity=Intensity(1000, 60.0),
            )
        except SpecError as error:  # the folder cannot be used
            parser.error(str(error))
        with group:
            done = group.collective_rpc("result")[0][0]
            ended = threading.Event()
            killer = threading.Thread(target=kill, args=(group, ended), daemon=True)
            killer.start()
            for line in lines[done:]:
                group.collective_rpc("count", args=(line,), retries=100)
            ended.set()
            killer.join()
            parts = group.collective_rpc("result", retries=1)
            restarts = group.status().restarts
    words = collections.Counter[str]()
    for _, part in parts:
        words.update(part)
    right = words == collections.Counter(" ".join(lines).lower().split())
    print(f"{sum(words.values())} words, {restarts} restarts: {right=}")
    print(f"this run began at line {done} of {len(lines)}")
    return 0 if right else 1


def kill(group: Executor[Counter], ended: threading.Event) -> None:
    """Send SIGKILL to one of the workers, four times a second."""
    while not ended.wait(0.25):
        pid = random.choice(group.ranks).pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it was just killed
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
