"""A disk that is full for a while: the rest of it is taken by a file of ours.

Guarantees: only a small filesystem is filled, such as a tmpfs made for the purpose: the machine's
own disk is left alone. What was taken is given back, at the end of the run at the latest.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 256 << 20
"""What may be free on a filesystem that is to be filled; arbitrary, and more than a test needs."""

_CHUNK = bytes(64 << 10)


class FullDisk:
    """The filesystem of *folder*, full from `fill` to `free`."""

    def __init__(self, folder: Path) -> None:
        same = folder.parent.stat().st_dev == folder.stat().st_dev
        self._file = (folder.parent if same else folder) / f".chaos-full-{os.getpid()}"
        self._folder = folder

    def refusal(self) -> str:
        """Return why it must not be filled; nothing where it may."""
        stats = os.statvfs(self._folder)
        free = stats.f_bavail * stats.f_frsize
        if free <= MOST_BYTES:
            return ""
        return (
            f"{free >> 20} MiB are free where {self._folder} lies, and more than "
            f"{MOST_BYTES >> 20} MiB are not filled: keep snapshots on a small tmpfs for this"
        )

    def fill(self) -> None:
        """Take all there is."""
        fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for chunk in (_CHUNK, _CHUNK[:512], _CHUNK[:1]):
                with contextlib.suppress(_NoSpace):
                    while True:
                        _write(fd, chunk)
        finally:
            os.close(fd)

    def free(self) -> None:
        """Give it back."""
        self._file.unlink(missing_ok=True)


class _NoSpace(Exception):
    pass


def _write(fd: int, chunk: bytes) -> None:
    try:
        os.write(fd, chunk)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _NoSpace from error
