"""Log folders of a run: paths of the streams and error files of each rank and round.

- The layout is torchrun's: ``stdout.log``, ``stderr.log`` and ``error.json`` of a rank lie in
  ``LOG_DIR/RUN-ID_xxxx/attempt_N/RANK``.
- Without ``--log-dir``, ``--redirects`` and ``--tee`` there is no folder: error files are memory of
  the launcher, which ranks reach through its ``/proc/PID/fd``.
- Lines of streams that are teed are shown when they are whole, or their round has ended.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final, Literal

from phalanx.runtime import descriptors
from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self, TextIO

Stream = Literal["stdout", "stderr"]
STREAMS: Final[tuple[tuple[Stream, int], ...]] = (("stdout", 1), ("stderr", 2))
_POLL: Final = 0.1  # seconds between two looks at files that are teed, as torchrun's


def streams_of(field_name: str, text: str, world_size: int) -> tuple[int, ...]:
    """Return which streams of each rank *text* means, as bits: 1 stdout, 2 stderr.

    *text* is one number for all ranks, or ``rank:number,...``, also of ranks that there are not.
    """
    if re.fullmatch("[0-3]", text):
        return (int(text),) * world_size
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise SpecError(field_name, text, "give 0, 1, 2 or 3, or rank:number,rank:number,...")
    found = {int(rank): int(bits) for rank, bits in (e.split(":") for e in text.split(","))}
    return tuple(found.get(rank, 0) for rank in range(world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSpec:
    """The destinations of the output of each rank.

    Attributes:
        folder: The ``--log-dir``; None for none, ``/dev/null`` for no files at all.
        redirects: For each rank the streams that go to files.
        tee: For each rank the streams that go to files and the console.
        shown: Ranks whose output the console shows; empty for all.
        prefix: Before each line that is teed; ``string.Template``.
        filters: For each stream, which of its teed lines are also written to one file.
    """

    folder: Path | None = None
    redirects: tuple[int, ...]
    tee: tuple[int, ...]
    shown: frozenset[int] = frozenset()
    prefix: str = "[${role_name}${local_rank}]:"
    filters: Mapping[Stream, tuple[str, ...]] = field(default_factory=dict[Stream, tuple[str, ...]])

    @property
    def has_files(self) -> bool:
        """Whether a folder is needed."""
        return str(self.folder) != os.devnull and (
            self.folder is not None or any(self.redirects) or any(self.tee)
        )


@dataclass(frozen=True, slots=True)
class LogPlan:
    """The files of a run; pickled by name.

    Attributes:
        folder: The run's; None for none.
        memory: Without a folder, the paths of the error files.
    """

    spec: LogSpec
    folder: Path | None
    memory: tuple[str, ...] = ()

    def attempt(self, number: int) -> Path:
        """Return the folder of one round."""
        assert self.folder is not None
        return self.folder / f"attempt_{number}"

    def error_file(self, rank: int, attempt: int) -> str:
        """Return where a rank writes its error."""
        if self.folder is None:
            return self.memory[rank]
        return str(self.attempt(attempt) / str(rank) / "error.json")

    def target(self, rank: int, attempt: int, stream: Stream, bit: int) -> str | None:
        """Return the file that *stream* goes to; None for the console."""
        if (self.spec.redirects[rank] | self.spec.tee[rank]) & bit:
            return str(self.attempt(attempt) / str(rank) / f"{stream}.log")
        return os.devnull if self.spec.shown and rank not in self.spec.shown else None

    def teed(self) -> Iterator[tuple[int, Stream]]:
        """Yield the ranks and streams that the console shows from files."""
        for rank, bits in enumerate(self.spec.tee):
            for stream, bit in STREAMS:
                if bits & bit and (not self.spec.shown or rank in self.spec.shown):
                    yield rank, stream


def open_logs(spec: LogSpec, run_id: str, world_size: int) -> LogPlan:
    """Make the run's folder, or memory for its error files.

    Raises:
        SpecError: the folder cannot be made.
    """
    if not spec.has_files:
        files = (descriptors.make_shared_file(f"error-{rank}") for rank in range(world_size))
        return LogPlan(spec, None, tuple(path for path, _ in files))
    try:
        base = spec.folder
        if base is None:
            base = Path(tempfile.mkdtemp(prefix="torchelastic_"))
        base.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f"{run_id}_", dir=base.absolute())  # a script may chdir
        return LogPlan(spec, Path(made))
    except OSError as error:
        text = f"{error.strerror}: name a folder that can be written"
        raise SpecError("--log-dir", str(spec.folder), text) from error


class Tail:
    """Shows on the console what is written to files; a thread, from `__enter__` to `__exit__`."""

    def __init__(self, plan: LogPlan, role: str, console: Mapping[Stream, TextIO]) -> None:
        self._plan = plan
        self._teed = tuple(plan.teed())
        self._prefix = Template(plan.spec.prefix)
        self._role = role
        self._console = console
        self._attempt = 0
        self._read: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchrun-tail", daemon=True)

    def __enter__(self) -> Self:
        if self._teed:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show what is left."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(_POLL):
            self._look()
        self._look()
        self._end_round()

    def _look(self) -> None:
        while True:
            following = self._next()  # before the last read
            for rank, stream in self._teed:
                self._show(rank, stream)
            if following is None:
                return
            self._end_round()
            self._attempt = following

    def _next(self) -> int | None:
        """Return the number of the next round; one that ended in its start has no folder."""
        assert self._plan.folder is not None
        names = (path.name.partition("_")[2] for path in self._plan.folder.glob("attempt_*"))
        numbers = (int(name) for name in names if name.isdecimal())
        return min((each for each in numbers if each > self._attempt), default=None)

    def _show(self, rank: int, stream: Stream) -> None:
        path = self._plan.attempt(self._attempt) / str(rank) / f"{stream}.log"
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
            self._read[path] = file.tell()
            *lines, self._rest[path] = (self._rest.get(path, b"") + data).split(b"\n")
            self._write(rank, stream, lines)

    def _end_round(self) -> None:
        """Show lines without an end."""
        for rank, stream in self._teed:
            path = self._plan.attempt(self._attempt) / str(rank) / f"{stream}.log"
            if rest := self._rest.pop(path, b""):
                self._write(rank, stream, [rest])

    def _write(self, rank: int, stream: Stream, whole: list[bytes]) -> None:
        if not whole:
            return
        lines = [line.decode(errors="replace") for line in whole]
        names = {"role_name": self._role, "rank": rank, "local_rank": rank}
        prefix = self._prefix.safe_substitute(names)
        console = self._console[stream]
        encoding = console.encoding or "utf-8"
        text = "".join(f"{prefix}{line}\n" for line in lines)
        with suppress(OSError, ValueError):  # it is gone, full or closed; the files have it all
            console.write(text.encode(encoding, "replace").decode(encoding))
            console.flush()
        wanted = self._plan.spec.filters.get(stream, ())
        found = [line for line in lines if any(each in line for each in wanted)]
        if found:
            path = self._plan.attempt(self._attempt) / f"filtered_{stream}.log"
            with suppress(OSError), path.open("a", encoding="utf-8") as file:
                file.writelines(f"{prefix}{line}\n" for line in found)
