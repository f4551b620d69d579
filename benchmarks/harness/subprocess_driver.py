"""`Driven`: one contestant in a separate process, which takes orders line by line.

Guarantees: no order waits for ever; a contestant that breaks is an error that names it and holds
its last words, and none of its processes outlives `end`, or the death of the driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any, Self

from benchmarks.contestants.protocol import CRASH
from phalanx.supervision import PhalanxError

from .process_group import MARK, Family, Watch, command
from .venvs import environment_of

_PACKAGE = "phalanx_peers"
_LAST_WORDS = 600  # characters


class ContestantBroke(PhalanxError):
    """A contestant raised, ended or did not answer in time.

    Attributes:
        name: Which.
        what: What became of it, on one line.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name
        self.what = what


class ContestantSilent(ContestantBroke):
    """It did not answer in time, and may yet."""


class Driven:
    """A contestant's process.

    Args:
        name: The contestant, as its folder calls it.
        python: The interpreter that has what it needs.
        folder: A folder of this run, in which it gets one for its temporary files.
        label: What it is called in what we say; None takes its name.
        may_be_stopped: Whether `pause` stops it.

    Raises:
        ContestantBroke: It cannot be started.
    """

    def __init__(
        self,
        name: str,
        python: str,
        folder: Path,
        label: str | None = None,
        *,
        may_be_stopped: bool = True,
    ) -> None:
        self.name = label or name
        self._may_be_stopped = may_be_stopped
        self.mark = uuid.uuid4().hex
        self.scratch = folder / self.mark[:6]  # short: the paths of sockets are
        self.scratch.mkdir()
        self._log = folder / f"{self.mark}.log"
        self._buffer = b""
        self.crash_flag = folder / f"{self.mark}.crash"
        more = {
            MARK: self.mark,
            CRASH: str(self.crash_flag),
            "TMPDIR": str(self.scratch),
            "XDG_RUNTIME_DIR": str(self.scratch),
        }
        self._watch = Watch(self.mark)
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [python, "-m", _PACKAGE, name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment_of(python, [str(folder)], more),
                    cwd=self.scratch,
                )
        except OSError as error:
            self._watch.end()
            raise ContestantBroke(self.name, f"cannot be started: {error}") from error
        self.pid = self._process.pid
        self.family = Family(self.pid, self.mark)
        self._is_paused = False

    def ask(self, order: str, within: float = 120.0, /, **fields: Any) -> dict[str, Any]:
        """Have *order* done; return the answer.

        Raises:
            ContestantBroke: It raised, ended, or did not answer within *within* seconds.
        """
        self.tell(order, **fields)
        return self.answer(within)

    def tell(self, order: str, /, **fields: Any) -> None:
        """Begin what `ask` does."""
        line = json.dumps({"do": order, **fields}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise self._broke("ended") from error

    def answer(self, seconds: float) -> dict[str, Any]:
        """End what `tell` began; what comes before the answer itself is in it as well."""
        deadline = time.monotonic() + seconds
        said: dict[str, Any] = {}
        while "done" not in said:
            said |= self._line(deadline)
        if "error" in said:
            raise ContestantBroke(self.name, said["error"])
        return said

    def await_word(self, word: str, seconds: float) -> None:
        """Return when it has said *word*, ahead of its answer."""
        deadline = time.monotonic() + seconds
        while word not in self._line(deadline):
            pass

    def pause(self) -> None:
        """Stop all its processes: what it does at rest is not to slow the others."""
        if self._may_be_stopped:
            self._is_paused = True
            self.family.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue them, the workers before the processes that watch them."""
        if self._is_paused:
            self._is_paused = False
            for pid in reversed(self.family.pids()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def end(self, seconds: float = 20.0) -> list[str]:
        """End it in good order, and by force what has not ended after *seconds*.

        Returns the commands of what had to be ended by force.
        """
        self.resume()
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        while self.family.pids() and time.monotonic() < deadline:
            time.sleep(0.01)  # there is no exit event for processes that are not children
        left = [command(pid) for pid in self.family.pids()]
        self.family.end()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._watch.end(seconds)
        return left

    def last_words(self) -> str:
        """Return the end of what it wrote to stderr."""
        return self._log.read_text(errors="replace")[-_LAST_WORDS:].strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _line(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ContestantSilent(self.name, "did not answer in time")
            data = os.read(fd, 1 << 16)
            if not data:
                raise self._broke("ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _broke(self, what: str) -> ContestantBroke:
        words = self.last_words().splitlines()
        return ContestantBroke(self.name, f"{what}: {words[-1]}" if words else what)


def link_package(folder: Path) -> None:
    """Make the contestants importable from *folder*, and nothing else of ours with them."""
    (folder / _PACKAGE).symlink_to(Path(__file__).parents[1] / "contestants")
