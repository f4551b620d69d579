"""Progress page: shared memory in which a worker notes the call it begins, and the driver cancels.

Guarantees: after a worker's death the driver can read which call it began last; a collective call
that the driver cancels is begun by no worker, and one that any worker has begun stays valid for
all. There is no lock: each word has one writer.

Cancellation works in rounds. A collective call carries the round it was sent in. When round k
begins, the calls of earlier rounds stay valid up to the highest one that any rank has begun
(``limits[k]``), and those behind it are void. A worker that is about to be stopped is *closed* in
such a round: it runs nothing behind the call that the driver has seen it begin.

The worker stores *begun*, then loads *round*; the driver stores *round*, then loads *begun*, and
only then the limit, which is open until then. Either the driver sees the call, whose limit then
includes it, or the worker sees the round, and waits for the limit. So all workers decide alike on a
call, provided that neither pair is reordered. The worker must not pay for a barrier on every
call, so the driver pays for both: ``membarrier(2)`` runs a full barrier on every processor that
runs a worker, on x86-64 and ARM64 alike. Without that system call the driver sleeps a few
milliseconds, far longer than any store buffer holds a store.

Source: the asymmetric fence of ``membarrier(2)``; Dekker's flags.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from typing import TYPE_CHECKING

from phalanx.runtime.linux import descriptors

if TYPE_CHECKING:
    from collections.abc import Sequence

_SYSCALL = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
_GLOBAL = 1 << 0
_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2

_BEGUN, _FINISHED, _ROUND, _BEGUN_AT, _SERVED, _CLOSED, _SAVING, _SPIN = range(8)
_LIMITS = 8  # where the limits of the latest rounds begin
_KEPT = 256  # rounds whose limit is kept; a call older than that is void
_OPEN = (1 << 64) - 1  # a limit that the driver has not set yet
_POLL = 5e-5  # seconds between two reads of it; the driver takes less


class ProgressPage:
    """One worker's page. Words are written whole, by one side only.

    Attributes:
        fd: The memory file behind it; handed to the worker.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> ProgressPage:
        """Return a new, empty page."""
        fd = descriptors.own(os.memfd_create("phalanx-page", os.MFD_CLOEXEC))
        with descriptors.closed_on_error(fd):
            os.ftruncate(fd, mmap.PAGESIZE)
            return cls(fd)

    # the worker's side

    def begin(self, call_id: int) -> int:
        """Publish that *call_id* begins; return the current round."""
        words = self._words
        words[_BEGUN_AT] = time.monotonic_ns()
        words[_BEGUN] = call_id
        return words[_ROUND]

    def is_void(self, call_id: int, sent_in: int, current: int, *, collective: bool) -> bool:
        """Whether *call_id*, sent in an earlier round, is cancelled; waits for an open limit.

        Without a deadline: the driver sets it at once, and this process dies with the driver.
        """
        while (closed := self._words[_CLOSED]) == _OPEN:
            time.sleep(_POLL)
        if closed and call_id >= closed:
            return True
        if not collective:
            return False
        if current - sent_in >= _KEPT:
            return True
        at = _LIMITS + (sent_in + 1) % _KEPT
        while (limit := self._words[at]) == _OPEN:
            time.sleep(_POLL)
        return call_id > limit

    def save(self, call_id: int) -> None:
        """Publish that *call_id* has run and that the state is being stored."""
        words = self._words
        words[_BEGUN_AT] = time.monotonic_ns()
        words[_SAVING] = call_id

    def finish(self, call_id: int, *, served: bool = True) -> None:
        """Publish that *call_id* has ended, or was void (not *served*)."""
        words = self._words
        words[_FINISHED] = call_id
        words[_SERVED] += served

    @property
    def spin(self) -> float:
        """Seconds to poll for the next message before blocking."""
        return self._words[_SPIN] and self._words[_SPIN] / 1e9

    def rest(self) -> None:
        """Publish that the stream waits for its items to be taken: its time stops."""
        self._words[_BEGUN_AT] = 0

    def go_on(self) -> None:
        """Publish that the stream makes its next item: its time begins anew."""
        self._words[_BEGUN_AT] = time.monotonic_ns()

    def retract(self, call_id: int) -> None:
        """Publish that *call_id* was begun last after all; for the proxy of a remote worker."""
        self._words[_BEGUN] = call_id

    # the driver's side

    @property
    def begun(self) -> int:
        """The call begun last; 0 for none. Of a closed worker: before it was closed."""
        begun, closed = self._words[_BEGUN], self._words[_CLOSED]
        return min(begun, closed - 1) if closed else begun

    @property
    def finished(self) -> int:
        """The call that ended last; 0 for none."""
        return self._words[_FINISHED]

    @property
    def saving(self) -> int:
        """The call with which the state was, or is being, stored last; 0 for none."""
        return self._words[_SAVING]

    @property
    def served(self) -> int:
        """The number of calls that have ended in this incarnation."""
        return self._words[_SERVED]

    @property
    def begun_at(self) -> float:
        """Monotonic time in seconds at which the last call, its next item or its `save` began.

        0.0 for none, and while a stream waits for its items to be taken.
        """
        return self._words[_BEGUN_AT] / 1e9

    def let_spin(self, seconds: float) -> None:
        """Set `spin`."""
        self._words[_SPIN] = round(seconds * 1e9)

    def enter(self, round_: int) -> None:
        """Set the round."""
        self._words[_ROUND] = round_

    def limit(self, round_: int, call_id: int) -> None:
        """Set the last call of earlier rounds that stays valid once *round_* begins."""
        self._words[_LIMITS + round_ % _KEPT] = call_id

    def shut(self) -> None:
        """Close this worker: the next round cancels every call that it has not begun."""
        self._words[_CLOSED] = self._words[_CLOSED] or _OPEN

    def settle(self) -> None:
        """Set what a closed worker has begun; what it begins from here on is void."""
        if self._words[_CLOSED] == _OPEN:
            self._words[_CLOSED] = self._words[_BEGUN] + 1

    @property
    def is_shut(self) -> bool:
        """Whether this worker is closed."""
        return bool(self._words[_CLOSED])

    def close(self) -> None:
        """Unmap and close the page."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            descriptors.close(self.fd)
            self.fd = -1


def withdraw(
    pages: Sequence[ProgressPage], round_: int, reached: int, shut: Sequence[ProgressPage] = ()
) -> int:
    """Begin *round_*: cancel the collective calls of earlier rounds that no worker has begun.

    For those of *pages* in *shut* every call that they have not begun is cancelled. Returns the
    last call that any worker has begun, at least *reached*: it and earlier ones stay valid for all.
    """
    for page in pages:
        page.limit(round_, _OPEN)
    for page in shut:
        page.shut()
    try:
        _fence()
        for page in pages:
            page.enter(round_)
        _fence()
    finally:  # no worker may wait for ever
        for page in shut:
            page.settle()
        reached = max((reached, *(page.begun for page in pages)))
        for page in pages:
            page.limit(round_, reached)
    return reached


def withdraw_behind(page: ProgressPage, round_: int, reached: int) -> None:
    """Begin *round_* on one page: cancel the collective calls of earlier rounds behind *reached*.

    On return the worker either sees that, or `begun` shows what it began before.
    """
    page.limit(round_, reached)
    _fence()
    page.enter(round_)
    _fence()


def _fence() -> None:
    if _membarrier(_GLOBAL_EXPEDITED) or _membarrier(_GLOBAL):
        return
    time.sleep(0.01)


def register_worker() -> None:
    """Register this process, a worker, for the driver's fences."""
    _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def _membarrier(command: int) -> bool:
    if _SYSCALL is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(_SYSCALL), command, 0, 0)
    return result == 0
