"""Snapshot folder: a directory with the snapshots of one executor's ranks.

Guarantees: one executor at a time uses it (``flock``, which the kernel releases with its holder);
the folder, and every file that is read, belongs to this user and is writable by no other, because
unpickling runs code; only snapshots are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from phalanx.runtime.linux import descriptors
from phalanx.supervision import SpecError

from .snapshot import SnapshotName, Stamp, verify

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = re.compile(r"cut-(\d{12,})\.rank-(\d+)-of-(\d+)")
_TEMPORARY = re.compile(r"\.cut-(\d{12,})\.rank-\d+-of-\d+\.\d+")
_DAMAGED = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EIO, errno.EACCES)


def check_folder(field: str, value: object) -> Path:
    """Return the folder *value*, absolute, created if it is missing.

    Raises:
        SpecError: other users may enter it, or it cannot be written to.
    """
    if not isinstance(value, str | os.PathLike):
        raise SpecError(field, value, "give a folder")
    given = os.fspath(cast("str", value))
    try:
        if not given:
            raise SpecError(field, given, "give a folder")
        folder = Path(os.path.abspath(Path(given).expanduser()))  # noqa: PTH100  # links stay so
        given = str(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = folder.stat()
    except (OSError, ValueError, RuntimeError) as error:  # with a NUL; of no such user
        raise SpecError(field, given, f"cannot be used: {error}") from None
    if not stat.S_ISDIR(seen.st_mode):
        raise SpecError(field, given, "is not a folder")
    if seen.st_uid != os.geteuid():
        why = f"belongs to user {seen.st_uid}; unpickling its files would run their code"
        raise SpecError(field, given, why)
    if seen.st_mode & 0o077:
        why = f"others may enter it (mode {stat.S_IMODE(seen.st_mode):o})"
        raise SpecError(field, given, f"{why}, and unpickling its files runs code; chmod 700 it")
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError as error:
        raise SpecError(field, given, f"cannot be written to: {error}") from None
    return folder


class SnapshotFolder:
    """The folder, locked.

    Raises:
        SpecError: another executor uses it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if not isinstance(error, BlockingIOError):
                raise
            why = "another executor keeps its snapshots there; give each a folder of its own"
            raise SpecError("checkpoint.where", str(folder), why) from None
        descriptors.own(self._fd)

    def names(self) -> list[SnapshotName]:
        """Return its snapshots, oldest first.

        Raises:
            OSError: it cannot be read.
        """
        found: list[SnapshotName] = []
        for entry in os.listdir(self._fd):  # noqa: PTH208  # its path may have changed
            whole = _NAME.fullmatch(entry)
            if whole is not None:
                found.append(SnapshotName(*map(int, whole.groups())))
        return sorted(found)

    def unfinished(self) -> dict[str, int]:
        """Return the temporary files of writers, dead or not, and the numbers of their cuts.

        Raises:
            OSError: it cannot be read.
        """
        found = map(_TEMPORARY.fullmatch, os.listdir(self._fd))  # noqa: PTH208  # as above
        return {each[0]: int(each[1]) for each in found if each is not None}

    def tidy(self) -> None:
        """Remove temporary files of dead workers; no worker is writing now."""
        self.remove(self.unfinished())

    def open(self, name: SnapshotName) -> int:
        """Return a descriptor of that snapshot, verified, which is the caller's to close.

        Raises:
            ValueError: it is missing, torn, altered, or writable by others.
            OSError: this process has no descriptor left, or the like.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(str(name), flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in _DAMAGED:
                raise
            raise ValueError(error.strerror) from error
        with descriptors.closed_on_error(fd):
            try:
                _check_file(fd, name)
            except OSError as error:
                raise ValueError(str(error)) from error  # it cannot be read
        return fd

    def look(self, name: SnapshotName) -> os.stat_result:
        """Return the status of that file."""
        return os.stat(str(name), dir_fd=self._fd)

    def remove(self, names: Iterable[SnapshotName | str]) -> int:
        """Remove those that are there; return how many were."""
        removed = 0
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(str(name), dir_fd=self._fd)
                removed += 1
        return removed

    def sync(self) -> None:
        """Sync the folder, as far as the disk can."""
        with contextlib.suppress(OSError):
            os.fsync(self._fd)

    def close(self) -> None:
        """Unlock it for another executor."""
        if self._fd >= 0:
            descriptors.close(self._fd)
            self._fd = -1


def _check_file(fd: int, name: SnapshotName) -> None:
    seen = os.fstat(fd)
    if not stat.S_ISREG(seen.st_mode):
        raise ValueError("it is not a plain file")
    if seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
        raise ValueError("others may have written it")
    stamp: Stamp = verify(fd)
    found = SnapshotName(stamp.number, stamp.rank, stamp.world_size)
    if found != name:
        raise ValueError(f"it is another: {found}")
