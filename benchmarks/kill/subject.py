"""`Victim`: one system, opened, of which a process is killed; and the outcome.

Guarantees: times are taken on the clock that all processes of a machine share; nothing waits
longer than its patience, after which a caller without an answer is recorded as such.

Elsewhere: the choice of systems and the number of kills (`kill`, `recovery_peers`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.harness.process_group import command
from benchmarks.harness.subprocess_driver import ContestantBroke, ContestantSilent, Driven

if TYPE_CHECKING:
    from .systems import System

_OPEN = 300.0  # seconds; some import for a minute
_CLOSE = 60.0
_WORK = 2.0  # seconds that a call in flight takes
_GONE = 15.0  # seconds in which what a dead driver leaves may end by itself
_LOOP = 15.0  # seconds for which ranks die in their start
_SHM = Path("/dev/shm")  # noqa: S108  # looked at, not written to
_MOST_NAMED = 3
_RANDOM = re.compile(r"[0-9a-f_.-]*[0-9][0-9a-f_.-]{3,}")


@dataclass(slots=True)
class Outcome:
    """What became of one death.

    Attributes:
        knows: Seconds until the caller of the call in flight heard anything; None: nothing, for
            as long as was waited.
        got: What it heard.
        works: Seconds until a call to all ranks succeeded; None: none did.
        failed: Calls that failed until then, the one in flight included.
        errors: What they said, each once.
        began: How often a rank began the call in flight, in all.
        ended: How often one ended it.
        gone: Seconds until every process of a dead driver had ended.
        starts: How often ranks were started in a crash loop.
        left: What was there after the end: processes, shared memory, files.
    """

    knows: float | None = None
    got: str = ""
    works: float | None = None
    failed: int = 0
    errors: list[str] = field(default_factory=list[str])
    began: int = 0
    ended: int = 0
    gone: float | None = None
    starts: int | None = None
    left: list[str] = field(default_factory=list[str])


class Victim:
    """One system, open.

    Args:
        system: What it is.
        python: The interpreter that has it.
        folder: A folder of this run.
        ranks: How many.
        patience: Seconds that an answer or a recovery is waited for.
    """

    def __init__(
        self, system: System, python: str, folder: Path, ranks: int, patience: float
    ) -> None:
        self.system = system
        self.ranks = min(ranks, system.most_ranks or ranks)
        self._patience = patience
        self._shm: set[str] = set()
        self._notes = folder / f"{time.monotonic_ns()}.notes"
        self._driven = Driven(system.module, python, folder, system.label)
        self._left: list[str] | None = None
        self._is_waiting = False
        try:
            opened = self._driven.ask("open", _OPEN, ranks=self.ranks, variant=system.variant)
        except BaseException:
            self._driven.end()
            raise
        self.version: str = opened["version"]
        self._pids: list[int] = opened["pids"]
        self._driver: int = opened["driver"]
        self._see_shm()

    # --- what happens to it -------------------------------------------------------------

    def kill_in_flight(self) -> Outcome:
        """Kill a rank that runs a call which all ranks run."""
        self._begin(_WORK)
        struck = self._strike(signal.SIGKILL)
        return self._outcome(struck)

    def kill_idle(self) -> Outcome:
        """Kill a rank that has nothing to do, and call at once."""
        struck = self._strike(signal.SIGKILL)
        return self._works(Outcome(), struck)

    def stop(self) -> Outcome:
        """Stop a rank that runs a call (SIGSTOP)."""
        self._begin(_WORK)
        struck = self._strike(signal.SIGSTOP)
        return self._outcome(struck)

    def crash_loop(self) -> Outcome:
        """Kill a rank, and have every rank die in its start for a while."""
        flag = self._driven.crash_flag
        flag.touch()
        outcome = Outcome()
        try:
            struck = self._strike(signal.SIGKILL)
            said = self._driven.ask("works", _LOOP + 30, timeout=_LOOP)
            outcome.starts = len(flag.read_text().splitlines())
            _count(outcome, said)
        finally:
            flag.unlink()
        return self._works(outcome, struck)

    def kill_driver(self) -> Outcome:
        """Kill the process that calls, while all ranks run a call."""
        self._begin(_GONE * 4)
        others = len(self._others())
        struck = time.monotonic()
        os.kill(self._driver, signal.SIGKILL)
        outcome = Outcome()
        while (left := self._others()) and time.monotonic() < struck + _GONE:
            time.sleep(0.01)  # not our children: there is no event for their exit
        outcome.gone = None if left else time.monotonic() - struck
        outcome.got = f"{others} other processes"
        outcome.left = self._what_is_left([command(pid) for pid in left])
        self._driven.end(0.0)
        self._forget_shm()
        self._left = outcome.left
        return outcome

    def close(self) -> list[str]:
        """End it in good order; return what that left, and remove it.

        A driver whose caller still waits cannot be asked to close: it is killed, and what that
        leaves says nothing.
        """
        if self._left is None and self._is_waiting:
            self._see_shm()
            self._driven.end(0.0)
            self._forget_shm()
            self._left = ["not closed: its caller still waits"]
        if self._left is None:
            self._see_shm()
            with contextlib.suppress(ContestantBroke):
                self._driven.ask("close", _CLOSE)
            self._left = self._what_is_left(self._driven.end())
            self._forget_shm()
        return self._left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts of it --------------------------------------------------------------------

    def _begin(self, seconds: float) -> None:
        """Have all ranks run a call, and return when each of them is in it."""
        self._notes.unlink(missing_ok=True)
        self._pids = self._driven.ask("pids", 30)["pids"]
        self._see_shm()
        self._driven.tell("slow", seconds=seconds, notes=str(self._notes))
        self._driven.await_word("begun", 30)
        deadline = time.monotonic() + 10
        while self.system.calls and self._noted()["began"] < self.ranks:
            if time.monotonic() > deadline:
                raise ContestantBroke(self.system.label, "its ranks do not begin a call")
            time.sleep(0.005)

    def _strike(self, number: int) -> float:
        """Send a signal to the second rank; return when."""
        struck = time.monotonic()
        os.kill(self._pids[1 % len(self._pids)], number)
        return struck

    def _outcome(self, struck: float) -> Outcome:
        """Return what the caller heard, and when the group worked again."""
        outcome = Outcome()
        try:
            said = self._driven.answer(self._patience)
        except ContestantBroke as error:
            outcome.got = self._last(error, outcome)
            if not isinstance(error, ContestantSilent):
                outcome.knows = time.monotonic() - struck
            self._note(outcome)
            return outcome
        if self.system.calls:
            outcome.knows = said["at"] - struck
        if "failed" in said:
            outcome.got, outcome.failed = said["failed"], 1
        else:
            outcome.got = f"{len(said['answers'])} answers"
        self._note(outcome)
        return self._works(outcome, struck)

    def _works(self, outcome: Outcome, struck: float) -> Outcome:
        try:
            said = self._driven.ask("works", self._patience * 3, timeout=self._patience)
        except ContestantBroke as error:
            outcome.errors.append(self._last(error, outcome))
            return outcome
        _count(outcome, said)
        if "at" in said:
            outcome.works = said["at"] - struck
            self._pids = said["pids"]
        return outcome

    def _last(self, error: ContestantBroke, outcome: Outcome) -> str:
        """Return what a driver comes to that answers no more."""
        if isinstance(error, ContestantSilent):
            self._is_waiting = True
            return f"nothing in {self._patience:g} s"
        outcome.failed += 1
        return f"the driver {error.what}"

    def _noted(self) -> Counter[str]:
        try:
            lines = self._notes.read_text().splitlines()
        except FileNotFoundError:
            lines = []
        return Counter(line.split()[0] for line in lines)

    def _note(self, outcome: Outcome) -> None:
        noted = self._noted()
        outcome.began, outcome.ended = noted["began"], noted["ended"]

    def _what_is_left(self, commands: list[str]) -> list[str]:
        left = [f"{count} x {name}" for name, count in _programs(commands).items()]
        names = sorted(name for name in self._shm if (_SHM / name).exists())
        if names:
            left.append(f"{len(names)} in /dev/shm ({_some(names)})")
        files = [path for path in self._driven.scratch.rglob("*") if not path.is_dir()]
        if files:
            tops = sorted({path.relative_to(self._driven.scratch).parts[0] for path in files})
            left.append(f"{len(files)} files in {_some(tops)}")
        return left

    def _others(self) -> list[int]:
        """Return its processes except the driver and the process that drives it."""
        ours = (self._driver, self._driven.pid)
        return [pid for pid in self._driven.family.pids() if pid not in ours]

    def _see_shm(self) -> None:
        """Note the names in shared memory that are its own: others use the machine as well."""
        self._shm |= self._driven.family.shm_names(self._driven.family.pids())

    def _forget_shm(self) -> None:
        """Remove what it left there."""
        for name in self._shm:
            with contextlib.suppress(OSError):
                (_SHM / name).unlink()


def _count(outcome: Outcome, said: dict[str, Any]) -> None:
    outcome.failed += len(said["failures"])
    outcome.errors = list(dict.fromkeys([*outcome.errors, *said["failures"]]))


def _programs(commands: list[str]) -> Counter[str]:
    """Return how often each program is among *commands*."""
    names = (each.split() for each in commands)
    return Counter(Path(words[0]).name if words else "a process" for words in names)


def _some(names: list[str]) -> str:
    """Return *names* without what is random in them, each once."""
    kinds = list(dict.fromkeys(_RANDOM.sub("*", name) for name in names))
    more = f", and {len(kinds) - _MOST_NAMED} more" if len(kinds) > _MOST_NAMED else ""
    return ", ".join(kinds[:_MOST_NAMED]) + more
