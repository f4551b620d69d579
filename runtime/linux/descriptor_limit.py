"""The limit of open descriptors (``RLIMIT_NOFILE``) of this process.

- The soft limit is only ever raised, never beyond the hard one, and in the driver by no more than
  the request and half of that for the program's own files.
- Processes that run a user's code are started with the limit that the program had set.

Imports the standard library only: the guardian uses it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

# Loop, collector, two zygotes, guardian, a rendezvous, an arena; measured with one rank.
FOR_ALL = 34
FOR_RANK = 24  # while it is started; 22 were measured with 1, 4 and 8 ranks
FOR_LINK = 12  # as many more where its messages go by ZeroMQ; 11 were measured
FOR_SERVING = 14  # of these, while it serves
_LEAST = 64  # what a worker itself needs is part of it

_lock = threading.Lock()
_before = _raised = 0
_expected = 0


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  # another thread, which the fork did not copy, may have had it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Reservation:
    """Descriptors that will be needed, together with those of all other reservations."""

    def __init__(self) -> None:
        self._count = 0

    def set(self, count: int) -> None:
        """Need *count* from now on; 0 gives them back."""
        global _expected  # noqa: PLW0603  # the limit is the process's
        with _lock:
            _expected += count - self._count
            self._count = count
            wanted = _expected
        if count:
            make_room(wanted)


def hard_limit() -> int:
    """Return how many descriptors this process may have at once if the soft limit is raised."""
    return _limits()[1]


def free() -> int:
    """Return how many more can be opened if the soft limit is raised."""
    return max(0, hard_limit() - _open())


def ranks_that_fit(count: int, each: int = FOR_RANK) -> int:
    """Return how many ranks, which need *each*, a driver with *count* free descriptors can have."""
    return max(0, count - FOR_ALL) // each


def make_room(count: int) -> bool:
    """Raise the soft limit so that *count* more can be opened; return whether it was raised."""
    global _before, _raised  # noqa: PLW0603  # the limit is the process's
    with _lock:
        soft, hard = _limits()
        wanted = min((_open() + count) * 3 // 2, hard)
        if wanted <= soft:
            return False
        if soft != _raised:
            _before = soft
        _raised = wanted
        _set(wanted)
        return True


def raise_limit() -> None:
    """Raise the soft limit to the hard one: for processes that run no user's code."""
    _set(hard_limit())


def keep_back() -> None:
    """Keep a quarter of what this process may have for `all_available`: see `raise_limit`."""
    _set(hard_limit() // 4 * 3)


@contextlib.contextmanager
def all_available() -> Generator[None, None, None]:
    """Within, what `keep_back` keeps can be opened too."""
    soft, hard = _limits()
    _set(hard)
    try:
        yield
    finally:
        _set(soft)


def own_limit() -> int:
    """Return the soft limit as it is without `make_room`."""
    soft, _ = _limits()
    return _before if soft == _raised else soft


def set_limit(soft: int) -> None:
    """Have the soft limit of a driver, but no fewer than a worker needs."""
    _set(min(max(soft, _LEAST), hard_limit()))


def is_shortage(error: BaseException | None) -> bool:
    """Whether *error* says that this process, or the machine, has no descriptor free."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _open() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208  # no use for Path objects
    except OSError as error:
        if not is_shortage(error):
            raise
        return _limits()[0]  # there is none to look with: all that it may have are open


def _limits() -> tuple[int, int]:
    """Return the soft and the hard limit; a large number for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return 1 << 30 if soft == endless else soft, 1 << 30 if hard == endless else hard


def _set(soft: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
