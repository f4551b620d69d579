"""What the ranks of a run are asked, what they note, and the gate between two blocks of steps.

Each note is one line of a file to which all ranks append: what, rank, process, step, when (seconds
of `time.monotonic`), and more:

- ``from``: the rank has the state of that step, and goes on from it.
- ``begin``: it begins that step.
- ``done``: it has applied that step. More: when it began, and the samples of all ranks in it.
- ``digest``: of the state after that step. More: the digest.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

BLOCK = 20  # steps from one checkpoint to the next, and from one gate to the next by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one run is to do; in the file ``asked.json`` of its folder.

    Attributes:
        folder: Of this run alone.
        sharded: Whether the model is sharded by FSDP2.
        survivors: As in `phalanx.RestartPolicy`, for ours.
        every: As in `Training`, for ours.
        reserves: Ranks that wait, for NVRx.
        memory: Whether the script keeps its state by `MemoryCheckpoint`, after each step.
        saves: Whether a checkpoint is written every `BLOCK` steps.
        gated: Whether each block waits for the gate.
        block: The steps of one.
        digests: Steps after which the digest is noted; the last of them is the last step. With
            none the run goes on until `wants_stop`, and notes the digest then.
    """

    folder: str
    ranks: int
    width: int
    layers: int
    sharded: bool = False
    survivors: str = "keep"
    every: int | None = None
    reserves: int = 0
    memory: bool = False
    saves: bool = True
    gated: bool = False
    block: int = BLOCK
    digests: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: str) -> Self:
        """Return what the run in *folder* is asked."""
        values: dict[str, Any] = json.loads((Path(folder) / "asked.json").read_text())
        values["digests"] = tuple(values["digests"])
        return cls(**values)

    def write(self) -> None:
        """Put it into its folder."""
        (Path(self.folder) / "asked.json").write_text(json.dumps(asdict(self)))

    @property
    def stop_file(self) -> Path:
        """The file that ends the run."""
        return Path(self.folder) / "stop"

    def wants_stop(self) -> bool:
        """Whether the run is to end after the present step."""
        return self.stop_file.exists()


class Notes:
    """Where one rank writes."""

    def __init__(self, asked: Asked, rank: int) -> None:
        self._rank = rank
        self._file = (Path(asked.folder) / "notes").open("ab", buffering=0)

    def put(self, what: str, step: int, *more: object) -> float:
        """Write a line; return when."""
        now = time.monotonic()
        words = (what, self._rank, os.getpid(), step, now, *more)
        self._file.write((" ".join(map(str, words)) + "\n").encode())
        return now


@dataclass(frozen=True, slots=True)
class Note:
    """One line."""

    what: str
    rank: int
    pid: int
    step: int
    at: float
    more: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Self:
        """Return what *line* says."""
        what, rank, pid, step, at, *more = line.split()
        return cls(what, int(rank), int(pid), int(step), float(at), tuple(more))


class Gate:
    """The side of the rank *number*: it waits until it may go on."""

    def __init__(self, asked: Asked, number: int) -> None:
        self._idle, self._gate = (
            os.open(Path(asked.folder) / name, os.O_RDWR) for name in ("idle", f"gate.{number}")
        )

    def wait(self) -> None:
        """Say that a block is done, and wait for the next."""
        os.write(self._idle, b".")
        os.read(self._gate, 1)
