"""Buffers: two of each rank, in memory that the driver holds or in a folder; one is always whole.

- A state is valid once all of it is written: its step is entered last.
- A buffer is overwritten only when the other one belongs to a set that every rank has completed.
- They outlive the ranks. Those in a folder outlive the driver, but not a loss of power.

`Store` is the driver's side, `RankBuffers` that of a rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from phalanx.runtime import check_folder, descriptors, writable_bytes
from phalanx.supervision import SpecError

from .errors import NoRoom, StateLost, WorldSizeChanged
from .packing import Packed, size_of, unpack

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from typing import Any

_MAGIC = b"phxtrn04"  # with the version of what is packed
_HEAD = 4096  # bytes before the skeleton
_STEP = struct.Struct("<q")
_STAMP = struct.Struct("<8sIIQQ")  # magic, rank, checksum, skeleton's and data's bytes
_STAMP_AT = 64
_ROW = struct.Struct("<qqqq")
"""The steps that a rank has begun, has tried to write, has written, and knows to be complete.

In files each step is one more: 0 is none."""
_ROW_SIZE = 64  # bytes; a cache line
_NONE = -1  # the step of a buffer without a state
_WRITE_TIMEOUT = 60.0  # seconds that a rank waits for the others to have written a step
_LOOK_AGAIN = 0.0005
_STRIDE = 8 << 20  # bytes reserved between two looks at the free memory
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_RUN = "training.json"
_RUN_KEYS = ("world_size", "seed", "sharded")


@dataclass(frozen=True, slots=True)
class Paths:
    """The location of the buffers: two files for each rank, and the table that all share."""

    slots: tuple[tuple[str, str], ...]
    table: str
    where: str


class Store:
    """The buffers of one run, held by the driver.

    Args:
        folder: For this run alone; None for memory.
        run: Values that a resumed run must not change: world size, seed, whether it is sharded,
            and the threads of a rank, which are taken from the folder.

    Raises:
        WorldSizeChanged, SpecError: the folder holds another run, or another driver uses it.
        NoRoom: not even the empty buffers can be made.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, run: dict[str, int]) -> None:
        ranks = run["world_size"]
        self.run = run
        self._fds: list[int] = []
        names = [(f"rank-{rank}.a", f"rank-{rank}.b") for rank in range(ranks)]
        self._folder = None if folder is None else check_folder("folder", folder)
        where = "memory" if self._folder is None else str(self._folder)
        try:
            if self._folder is not None:
                self._claim(self._folder)
            self.paths = Paths(
                tuple((self._make(a), self._make(b)) for a, b in names),
                self._make("table", _ROW_SIZE * ranks),
                where,
            )
        except OSError as error:
            self.close()
            if self._folder is None or error.errno in _NO_ROOM:
                raise NoRoom(where, _HEAD * 2 * ranks, str(error)) from error
            raise SpecError("folder", where, f"{error}: give another folder") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the memory, or the folder, whose files stay."""
        while self._fds:
            descriptors.close(self._fds.pop())

    def _claim(self, folder: Path) -> None:
        import fcntl  # noqa: PLC0415  # for folders only

        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fds.append(descriptors.own(fd))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "another run uses it; give each a folder of its own"
            raise SpecError("folder", str(folder), remedy) from None
        note = folder / _RUN
        if not note.exists():
            made = note.with_suffix(".new")
            made.write_text(json.dumps(self.run))
            made.rename(note)
            return
        try:
            kept: dict[str, int] = json.loads(note.read_text())
            had = [kept[key] for key in (*_RUN_KEYS, "threads")]
        except (ValueError, KeyError, TypeError) as error:
            raise StateLost(f"{note} is damaged: {error!r}; give another folder") from None
        if had[0] != self.run["world_size"]:
            raise WorldSizeChanged(had[0], self.run["world_size"])
        for key in _RUN_KEYS:
            if kept[key] != self.run[key]:
                raise SpecError(key, self.run[key], f"the run in {folder} has {kept[key]!r}")
        self.run = {**self.run, "threads": kept["threads"]}

    def _make(self, name: str, size: int = _HEAD) -> str:
        """Make the file *name*, of zeros, if it is missing; return the path for the ranks."""
        if self._folder is None:
            shared, fd = descriptors.make_shared_file(f"phalanx-train-{name}", size)
            self._fds.append(fd)
            return shared
        path = self._folder / name
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
        return str(path)


class _Slot:
    """One buffer, mapped."""

    def __init__(self, path: str, where: str) -> None:
        self._where = where
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._fd, 0)

    def close(self) -> None:
        os.close(self._fd)

    @property
    def size(self) -> int:
        return len(self._map)

    @property
    def step(self) -> int:
        """The step of its state; -1 if it has none that is whole."""
        above: int = _STEP.unpack_from(self._map)[0]
        return above - 1

    @step.setter
    def step(self, step: int) -> None:
        self._map[: _STEP.size] = _STEP.pack(step + 1)  # pack_into would write zeros before

    def _reserve(self, size: int) -> None:
        where = self._where
        if size <= self.size:
            return
        size += -size % (1 << 20)
        try:
            for start in range(self.size, size, _STRIDE):
                room = writable_bytes(size - start) if where == "memory" else size
                if room < size - start:  # other ranks take some at the same time
                    raise OSError(f"{room} bytes are free")  # noqa: TRY301  # as the kernel does
                os.posix_fallocate(self._fd, start, min(_STRIDE, size - start))
            self._map = mmap.mmap(self._fd, size)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self._fd, self.size)
            raise NoRoom(where, size, str(error)) from error

    def data(self, start: int, size: int) -> torch.Tensor:
        """Return bytes of it."""
        if not size:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=size)

    def write(self, step: int, rank: int, packed: Packed, part: tuple[int, int]) -> None:
        """Write that *part* of *packed*.

        Raises:
            NoRoom: there is not enough; it holds no state then.
        """
        meta, (low, high) = packed.meta, part
        begin = _data_at(len(meta))
        self.step = _NONE
        self._reserve(begin + high - low)
        self._map[_HEAD : _HEAD + len(meta)] = meta
        packed.copy_to(self.data(begin, high - low), low, high)
        check = zlib.crc32(meta)
        _STAMP.pack_into(self._map, _STAMP_AT, _MAGIC, rank, check, len(meta), high - low)
        self.step = step

    def read(self, rank: int) -> tuple[bytes, torch.Tensor]:
        """Return skeleton and data.

        Raises:
            StateLost: it is torn, or another rank's.
        """
        magic, whose, check, length, size = _STAMP.unpack_from(self._map, _STAMP_AT)
        begin = _data_at(length)
        meta = self._map[_HEAD : _HEAD + length]
        found = (magic, whose, zlib.crc32(meta))
        if found != (_MAGIC, rank, check) or begin + size > self.size:
            msg = f"a buffer of rank {rank} is torn, was altered, or is of another phalanx"
            raise StateLost(msg)
        return meta, self.data(begin, size)

    def is_whole(self, rank: int) -> bool:
        """Whether it can be read."""
        try:
            self.read(rank)
        except StateLost:
            return False
        return True


def _data_at(length: int) -> int:
    return _HEAD + -(-length // 64) * 64


class RankBuffers:
    """The buffers of the run, as *rank* uses them.

    Args:
        spread: Whether the ranks hold equal states, of which each writes an equal part.
    """

    def __init__(self, paths: Paths, rank: int, *, spread: bool) -> None:
        self._paths = paths
        self._rank = rank
        self._world = len(paths.slots)
        self._spread = spread
        self._mine = [_Slot(path, paths.where) for path in paths.slots[rank]]
        with Path(paths.table).open("r+b") as file:
            self._table = mmap.mmap(file.fileno(), _ROW_SIZE * self._world)
        self._tried = self._complete = _NONE

    def close(self) -> None:
        """Close the descriptors."""
        for slot in self._mine:
            slot.close()

    def begin(self, step: int) -> None:
        """Note that this rank begins *step*."""
        self._note(0, step)

    @property
    def begun(self) -> int:
        """The highest step that any rank has begun since the last `agree`; -1 for none."""
        return max(self._row(rank)[0] for rank in range(self._world))

    @property
    def is_used(self) -> bool:
        """Whether there has ever been a complete set."""
        return any(self._row(rank)[3] >= 0 for rank in range(self._world))

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the states that this rank has whole."""
        return tuple(
            slot.step for slot in self._mine if slot.step >= 0 and slot.is_whole(self._rank)
        )

    def agree(self, complete: int, step: int) -> None:
        """Note that set *complete* (-1: none) is complete, and that all go on from *step*.

        Later ones are void. The ranks must meet before any of them writes again.
        """
        for slot in self._mine:
            if slot.step > complete:
                slot.step = _NONE
        self._tried = self._complete = complete
        at, known = self._rank * _ROW_SIZE, complete + 1
        self._table[at : at + _ROW.size] = _ROW.pack(step + 1, known, known, known)

    def write(self, step: int, packed: Packed) -> None:
        """Write the state of *step*, as every rank does.

        Raises:
            NoRoom: there is not enough memory or space; the other buffer is left.
            StateLost: another rank has not written its last state.
        """
        self._settle()
        keep = next((slot for slot in self._mine if slot.step == self._complete), None)
        slot = next(slot for slot in self._mine if slot is not keep)
        low, high = 0, packed.size
        if self._spread:
            low, high = _share(packed.size, self._rank, self._world)
        try:
            slot.write(step, self._rank, packed, (low, high))
            self._note(2, step)
        finally:  # also where there was no room: the others are not to wait for it
            self._tried = step
            self._note(1, step)

    def read(self, step: int) -> Any:
        """Return the state of *step*; its tensors are in memory of their own.

        Raises:
            StateLost: it is not there, or damaged.
        """
        if not self._spread:
            meta, data = self._find(self._mine, step).read(self._rank)
            return unpack(meta, data.clone())
        own, _ = self._find(self._mine, step).read(self._rank)
        whole = torch.empty(size_of(own), dtype=torch.uint8, device="cpu")
        for rank in range(self._world):
            with _opened(self._paths, rank) as slots:
                _, data = self._find(slots, step).read(rank)
                low, high = _share(whole.numel(), rank, self._world)
                if data.numel() != high - low:
                    msg = f"the buffers of step {step} do not fit together"
                    raise StateLost(msg)
                whole[low:high].copy_(data)
        return unpack(own, whole)

    def _find(self, slots: Iterable[_Slot], step: int) -> _Slot:
        for slot in slots:
            if slot.step == step:
                return slot
        msg = f"no buffer in {self._paths.where} holds step {step}"
        raise StateLost(msg)

    def _settle(self) -> None:
        """Find out whether the set that was written last is complete; all ranks find the same.

        A rank that is ahead has settled it before, and does not overwrite what is complete.
        """
        step, others = self._tried, range(self._world)
        if step <= self._complete:
            return
        deadline = time.monotonic() + _WRITE_TIMEOUT
        while late := [rank for rank in others if self._row(rank)[1] < step]:
            if time.monotonic() > deadline:
                msg = f"ranks {late} have not written step {step} in {_WRITE_TIMEOUT:g} s"
                raise StateLost(msg)
            time.sleep(_LOOK_AGAIN)
        if all(self._row(rank)[2] == step or self._row(rank)[3] >= step for rank in others):
            self._complete = step
            self._note(3, step)

    def _row(self, rank: int) -> tuple[int, int, int, int]:
        begun, tried, written, complete = _ROW.unpack_from(self._table, rank * _ROW_SIZE)
        return begun - 1, tried - 1, written - 1, complete - 1

    def _note(self, column: int, step: int) -> None:
        at = self._rank * _ROW_SIZE + column * _STEP.size
        self._table[at : at + _STEP.size] = _STEP.pack(step + 1)


@contextlib.contextmanager
def _opened(paths: Paths, rank: int) -> Generator[list[_Slot]]:
    slots = [_Slot(path, paths.where) for path in paths.slots[rank]]
    try:
        yield slots
    finally:
        for slot in slots:
            slot.close()


def _share(size: int, rank: int, world: int) -> tuple[int, int]:
    """Return the part of *size* bytes that *rank* writes."""
    low, high = (size * number // world // 64 * 64 for number in (rank, rank + 1))
    return low, size if rank == world - 1 else high
