"""Which systems are measured, and one run of one of them: a tree of processes that all end.

Guarantees: a run in which no step is done for the patience that was asked is given up, with the
reason; `end` leaves no process and no file of it, and the death of this process no process.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.harness.process_group import MARK, Family, Watch, adopt_orphans
from benchmarks.harness.venvs import absent_without, environment_of
from phalanx.supervision import PhalanxError

from .ranks.notes import Asked, Note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.harness.venvs import Environments

_ROOT = Path(__file__).parents[2]
_LAST_WORDS = 300  # characters
_OURS = ("benchmarks.training.ours",)
_TORCHRUN = ("--standalone", "--nproc-per-node={ranks}", "--max-restarts=1000000")
_SCRIPT = (*_TORCHRUN, "-m", "benchmarks.training.ranks.script")


@dataclass(frozen=True, slots=True)
class System:
    """How one is started, and what it is asked.

    Attributes:
        words: What follows ``python -m``; the folder of the run comes last.
        trains: Systems with the same word compute the same, undisturbed.
        peer: Whose environment it needs; None for ours.
        options: Of `Asked`.
    """

    name: str
    words: tuple[str, ...]
    trains: str
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_driven(self) -> bool:
        """Whether a driver calls the steps, so that one gate holds all ranks."""
        return self.words == _OURS

    def with_options(self, **options: Any) -> System:
        """Return it, asked something else."""
        return replace(self, options={**self.options, **options})


_ALL = (
    System("DDP, survivors kept", _OURS, "ours, DDP"),
    System("DDP, all anew", _OURS, "ours, DDP", options={"survivors": "restart"}),
    System("FSDP2, survivors kept", _OURS, "ours, FSDP2", options={"sharded": True}),
    System(
        "phalanx torchrun, memory",
        ("phalanx", "torchrun", *_SCRIPT),
        "script, memory",
        options={"memory": True, "saves": False},
    ),
    System("phalanx torchrun", ("phalanx", "torchrun", *_SCRIPT), "script"),
    System("torchrun", ("torch.distributed.run", *_SCRIPT), "script"),
    System("NVRx in-process", ("benchmarks.training.ranks.nvrx",), "script", "nvrx"),
    System("torchft", ("benchmarks.training.ranks.torchft",), "torchft", "torchft"),
)
SYSTEMS = {each.name: each for each in _ALL}
_BARE = SYSTEMS["torchrun"].with_options(saves=False)


def unprotected(system: System) -> System:
    """Return the script without protection, to which the step of *system* is compared."""
    return _BARE.with_options(sharded=system.options.get("sharded", False))


def undisturbed(system: System) -> System:
    """Return what has the hash that *system* is to end with."""
    if system.trains == "script":
        return _BARE
    return next(each for each in _ALL if each.trains == system.trains)


class GaveUp(PhalanxError):
    """A run ended too early, or did no step for too long."""


class Run:
    """A run of *system*, from its start on.

    Args:
        system: What is started.
        sizes: Ranks, width and layers.
        patience: Seconds without a step after which it is given up.
        environments: Where peers are.

    Attributes:
        seen: The notes that have been read.

    Raises:
        GaveUp: the peer is absent.
    """

    def __init__(
        self,
        system: System,
        sizes: dict[str, Any],
        patience: float,
        environments: Environments,
        **asked: Any,
    ) -> None:
        python = environments.python(system.peer)
        if python is None:
            raise GaveUp(absent_without(system.peer))
        adopt_orphans()
        self._patience = patience
        with contextlib.ExitStack() as made:
            self._folder = Path(tempfile.mkdtemp(prefix="phalanx-bench-"))
            made.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.asked = Asked(folder=str(self._folder), **sizes, **system.options, **asked)
            self.asked.write()
            gates = 1 if system.is_driven else self.asked.ranks
            fds: list[int] = []
            for name in ("idle", *(f"gate.{number}" for number in range(gates))):
                os.mkfifo(self._folder / name)
                fds.append(os.open(self._folder / name, os.O_RDWR))
                made.callback(os.close, fds[-1])
            self._idle, *self._gates = fds
            (self._folder / "packages").mkdir()
            (self._folder / "packages" / "benchmarks").symlink_to(_ROOT / "benchmarks")
            mark = uuid.uuid4().hex
            made.callback(Watch(mark).end)
            env = environment_of(
                python,
                [str(self._folder / "packages")],
                {
                    MARK: mark,
                    "TMPDIR": str(self._folder),
                    "PYTHONWARNINGS": "ignore",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                },
            )
            words = [word.format(ranks=self.asked.ranks) for word in system.words]
            with (self._folder / "log").open("wb") as log:
                self._popen = subprocess.Popen(
                    [python, "-m", *words, str(self._folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    cwd=self._folder,
                    start_new_session=True,
                )
            self._family = Family(self._popen.pid, mark)
            made.callback(self._popen.wait)
            made.callback(self._popen.kill)
            made.callback(self._family.end)
            self._made = made.pop_all()
        self.seen: list[Note] = []
        self._read = 0
        self._alive = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def notes(self) -> list[Note]:
        """Return the notes so far.

        Raises:
            GaveUp: there was no step for too long.
        """
        path = self._folder / "notes"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")
            self._read += len(whole[0]) + len(whole[1])
            fresh = [Note.of(line) for line in whole[0].decode().splitlines()]
            self.seen += fresh
            if any(note.what in ("done", "digest") for note in fresh):
                self._alive = time.monotonic()
        if time.monotonic() > self._alive + self._patience:
            raise self._gave_up(f"no step for {self._patience:g} s")
        return self.seen

    def pass_time(self, until: float) -> None:
        """Wait until then.

        Raises:
            GaveUp: it has ended, or does nothing.
        """
        while (left := until - time.monotonic()) > 0:
            self.notes()
            if self._popen.poll() is not None:
                raise self._gave_up(f"ended with exit code {self._popen.returncode}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(min(left, 0.5))

    def wait_steps(self, least: int) -> None:
        """Wait until a rank has done *least* steps.

        Raises:
            GaveUp: it has ended, or does nothing.
        """
        while not any(note.what == "done" and note.step >= least for note in self.notes()):
            self.pass_time(time.monotonic() + 0.1)

    def newest(self, rank: int) -> int | None:
        """Return the process that is *rank*; None if it does not live."""
        pids = [note.pid for note in self.notes() if note.rank == rank]
        return pids[-1] if pids and pids[-1] in self._family.pids() else None

    def blocks(self) -> Iterator[float]:
        """Yield how long each block takes; one is done whenever the next time is asked for.

        Raises:
            GaveUp: it takes too long.
        """
        self._wait_idle()
        while True:
            began = time.monotonic()
            for gate in self._gates:
                os.write(gate, b".")
            self._wait_idle()
            yield time.monotonic() - began

    def _wait_idle(self) -> None:
        deadline = time.monotonic() + self._patience
        for _ in self._gates:
            while not select.select([self._idle], [], [], 0.5)[0]:
                if self._popen.poll() is not None or time.monotonic() > deadline:
                    raise self._gave_up("a block of steps without a kill did not end")
            os.read(self._idle, 1)

    def finish(self) -> list[Note]:
        """Wait for its end; return all notes.

        Raises:
            GaveUp: it does not end, or has not noted a digest.
        """
        while self._popen.poll() is None:
            self.notes()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(0.1)
        if not any(note.what == "digest" for note in self.notes()):
            raise self._gave_up(f"ended with exit code {self._popen.returncode}")
        return self.seen

    def end(self) -> None:
        """End all of its processes, and remove its files."""
        self._made.close()

    def _gave_up(self, what: str) -> GaveUp:
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "")
        return GaveUp(f"{what}; last words: {last[:_LAST_WORDS]}" if last else what)
