"""Snapshot: the state of one rank as a file, in anonymous memory or on a disk.

Guarantees: a snapshot is complete or absent. One in memory is sealed. One on a disk is written
under another name, synced and renamed; a checksum over all of it shows a torn, altered or foreign
one before a byte of it is unpickled. Large buffers are written from their place, once, and read
from memory without a copy; a restored value may be written in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.runtime.linux import descriptors
from phalanx.runtime.memory.mapping import copied
from phalanx.runtime.wire.codec import Encoded, encode
from phalanx.runtime.wire.packet_encoder import (
    Payload,
    decode_large,
    lay_out,
    new_message_file,
    read_file,
    seal_message_file,
    write_all,
    write_file,
)

if TYPE_CHECKING:
    from pathlib import Path


MAGIC = b"phxstate"
VERSION = 2
HEAD = 128
"""Bytes before the state itself; a multiple of what its buffers are aligned to."""

_STAMP = struct.Struct("<8sIIIIQQQ")
"""magic, version, rank, world size, incarnation, number, when in ns since 1970, bytes of state"""
_DIGEST = 32
_CHUNK = 1 << 22  # bytes hashed at once, and copied at once


@dataclass(frozen=True, slots=True, order=True)
class SnapshotName:
    """The identity of a snapshot in a folder: its file's name."""

    number: int
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"cut-{self.number:012d}.rank-{self.rank}-of-{self.world_size}"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Header of a snapshot.

    Attributes:
        number: The same for all snapshots of one cut; later cuts have higher ones.
        at: When it was taken, in seconds since 1970.
        size: Bytes of the state.
    """

    number: int
    rank: int
    world_size: int
    incarnation: int
    at: float
    size: int = 0

    def pack(self, size: int) -> bytes:
        """Return it as bytes, for a state of *size* bytes."""
        who = self.rank, self.world_size, self.incarnation
        return _STAMP.pack(MAGIC, VERSION, *who, self.number, int(self.at * 1e9), size)

    @classmethod
    def unpack(cls, head: bytes) -> Stamp:
        """Return the stamp in *head*.

        Raises:
            ValueError: *head* is not the beginning of a snapshot.
        """
        if len(head) < HEAD or not head.startswith(MAGIC):
            raise ValueError("it is no snapshot")
        _, version, rank, world_size, incarnation, number, at, size = _STAMP.unpack_from(head)
        if version != VERSION:
            raise ValueError(f"it has format {version}, and this phalanx reads format {VERSION}")
        return cls(number, rank, world_size, incarnation, at / 1e9, size)


def store_snapshot(encoded: Encoded, stamp: Stamp, folder: Path | None) -> Payload:
    """Store a snapshot, in memory or in *folder*; return the message about it for the driver.

    Raises:
        MessageTooLarge, OSError: there is no room for it.
    """
    if folder is None:
        _, parts, offsets, size = lay_out(encoded)
        header = memoryview(stamp.pack(size).ljust(HEAD, b"\0"))
        places = [0, *(HEAD + offset for offset in offsets)]
        file = write_file([header, *parts], places, HEAD + size, "phalanx-snapshot")
        return Payload.in_file(file, HEAD + size)
    name = SnapshotName(stamp.number, stamp.rank, stamp.world_size)
    size = _keep_in_folder(encoded, stamp, folder / str(name))
    return Payload.of(encode(size, "a size"))


def _keep_in_folder(encoded: Encoded, stamp: Stamp, path: Path) -> int:
    """Write the snapshot durably to *path*; return its size in bytes.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    _, parts, offsets, size = lay_out(encoded)
    stamped = stamp.pack(size)
    digest = _sha256(stamped)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(temporary, flags, 0o600)
    try:
        try:
            at = 0
            for part, offset in zip(parts, offsets, strict=True):
                digest.update(bytes(offset - at))  # the gaps that align the buffers are zeros
                for done in range(0, part.nbytes, _CHUNK):
                    piece = part[done : done + _CHUNK]
                    digest.update(piece)
                    write_all(file, piece, HEAD + offset + done)
                at = offset + part.nbytes
            os.ftruncate(file, HEAD + size)
            head = stamped + digest.digest()
            write_all(file, memoryview(head.ljust(HEAD, b"\0")), 0)
            os.fsync(file)
        finally:
            os.close(file)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the new name, too, survives a loss of power
    finally:
        os.close(folder)
    return HEAD + size


def verify(file: int) -> Stamp:
    """Read all of the snapshot on a disk in *file*; return its stamp.

    Raises:
        ValueError: it is torn, altered, or no snapshot.
    """
    head = os.pread(file, HEAD, 0)
    stamp = Stamp.unpack(head)
    there = os.fstat(file).st_size
    if there != HEAD + stamp.size:
        raise ValueError(f"it is torn: {there} bytes of {HEAD + stamp.size}")
    digest = _sha256(head[: _STAMP.size])
    buffer = memoryview(bytearray(min(_CHUNK, stamp.size)))
    at = HEAD
    while got := os.preadv(file, [buffer], at):
        digest.update(buffer[:got])
        at += got
    _compare(digest.digest(), head)
    return stamp


def _sha256(stamped: bytes) -> Any:
    import hashlib  # noqa: PLC0415  # for snapshots on a disk only

    return hashlib.sha256(stamped)


def _compare(digest: bytes, head: bytes) -> None:
    if head[_STAMP.size :] != digest.ljust(HEAD - _STAMP.size, b"\0"):
        raise ValueError("it is torn or was altered: its checksum is wrong")


def load_snapshot(file: int, start: int, size: int) -> Any:
    """Return the state in the snapshot that takes *size* bytes from *start* of *file*.

    Raises:
        ValueError: it is no snapshot, or torn.
        Exception: whatever unpickling raises.
    """
    try:
        sealed = bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # only memory has seals
        sealed = False
    # A disk's is not mapped: if it is truncated meanwhile, its reader gets SIGBUS.
    whole = read_file(file, start + size)[start:] if sealed else copied(file, start, size)
    head = bytes(whole[:HEAD])
    if Stamp.unpack(head).size + HEAD != size:
        raise ValueError(f"it is torn: {size} bytes, which is not the size in its header")
    if not sealed:
        digest = _sha256(head[: _STAMP.size])
        digest.update(whole[HEAD:])
        _compare(digest.digest(), head)
    return decode_large(whole[HEAD:])


def join_snapshots(files: list[tuple[int, int]]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return a memory file with all of *files* (descriptor, size), and (start, size) of each.

    Raises:
        MessageTooLarge: there is not enough memory.
        ValueError: one is cut.
    """
    spans: list[tuple[int, int]] = []
    end = 0
    for _, size in files:
        spans.append((end, size))
        end = -(-(end + size) // mmap.PAGESIZE) * mmap.PAGESIZE
    target = new_message_file(end, "phalanx-snapshots")
    with descriptors.closed_on_error(target):
        for (file, _), (start, size) in zip(files, spans, strict=True):
            os.lseek(target, start, os.SEEK_SET)
            done = 0
            while done < size:
                sent = os.sendfile(target, file, done, size - done)
                if not sent:
                    raise ValueError("a snapshot is shorter than it was: another program cut it")
                done += sent
        seal_message_file(target)
    return target, tuple(spans)
