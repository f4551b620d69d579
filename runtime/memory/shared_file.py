"""Memory as a file without a name, which processes open by a path while its maker holds it open."""

from __future__ import annotations

import os

from phalanx.runtime.linux import descriptors


def make_shared_file(name: str, size: int = 0) -> tuple[str, int]:
    """Make a file of *size* zeros; return its path and the descriptor, for `descriptors.close`.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """
    fd = descriptors.own(os.memfd_create(name, os.MFD_CLOEXEC))
    try:
        if size:
            os.posix_fallocate(fd, 0, size)
    except BaseException:
        descriptors.close(fd)
        raise
    return f"/proc/{os.getpid()}/fd/{fd}", fd
