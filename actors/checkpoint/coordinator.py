"""Coordinates checkpoints: when one is due, which parts it has, when it counts.

The states of one executor's ranks, as they are taken: when, and which belong together.

A **cut** is the state of some ranks at one call: of all ranks where they are formed together, of
one where each stands for itself. It is *kept* once every one of its ranks has stored its part and
has then answered that call. So what is given back never has half of a call in it, nor a call that
ended in a death or is about to be sent again.

Guarantees: after every death, and at every moment in between, the newest kept cut is whole.

Left to others: what is kept (`Kept`), sending and hearing (`plane`), what happens after a failed
restore (`keeper`). May be used from any thread; its lock is taken last but that of `Kept`, and
under it nobody is waited for.

How many calls there were, and of how many the state is kept.

Guarantees: a value for each key, which is a rank, or the group where all ranks make one cut. It
decides; it does nothing.

The calls by which an executor itself has its ranks store their state.

Guarantees: such a call goes to every rank, in its turn among the user's calls, and does nothing
but what every call can: have the state stored with it. It may run twice.

Left to others: what is stored and kept (`cuts`), which of the user's calls it is stored with.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.actors.calls.call import Call, Shape, check_timeout, terms_of
from phalanx.actors.group.messages import CutDue, CutFailed, CutsChanged
from phalanx.actors.spec.checkpoint_policy import Checkpoint
from phalanx.actors.spec.worker import declared_limit
from phalanx.runtime import FarFrame, Flag, Kind, OwnedLock, RemoteFailure, descriptors, encode
from phalanx.supervision import RuntimeFault, Strategy

from .snapshot import Cut, Part
from .store import Kept

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path

    from phalanx.actors.calls.plane import Plane
    from phalanx.actors.spec.checkpoint_policy import CheckpointPolicy
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.runtime import Frame, Hub, Timer


@dataclass(slots=True)
class Count:
    """The calls of one key: those *sent*, those up to the last cut *begun*, those *saved*."""

    sent: int = 0
    begun: int = 0
    saved: int = 0


@dataclass(slots=True)
class Counts:
    """The calls of an executor, by key."""

    _by_key: dict[int, Count] = field(default_factory=dict[int, Count])

    def add(self, keys: Iterable[int], every: int | None) -> list[int]:
        """Count a call; return the keys for which a cut is due with it, one to *every* calls."""
        due: list[int] = []
        for key in keys:
            count = self._by_key.setdefault(key, Count())
            count.sent += 1
            if every is not None and count.sent - count.begun >= every:
                due.append(key)
        return due

    def begin(self, keys: Iterable[int]) -> dict[int, int]:
        """Note that a cut of *keys* begins; return how many calls it has in it."""
        covers: dict[int, int] = {}
        for key in keys:
            count = self._by_key.setdefault(key, Count())
            covers[key] = count.begun = count.sent
        return covers

    def save(self, covers: Mapping[int, int]) -> None:
        """Note that a cut with so many calls in it is kept."""
        for key, calls in covers.items():
            count = self._by_key.setdefault(key, Count())
            count.saved = max(count.saved, calls)

    def void(self, keys: Iterable[int]) -> None:
        """Note that cuts of *keys* that had begun will not be kept: the next call is due again."""
        for key in keys:
            count = self._by_key.get(key)
            if count is not None:
                count.begun = count.saved

    def forget(self, keys: Iterable[int]) -> None:
        """Note that *keys* go on from what is kept, without the calls since."""
        for key in keys:
            self._by_key.pop(key, None)

    def clear(self) -> None:
        """Begin anew."""
        self._by_key.clear()

    @property
    def is_begun(self) -> bool:
        """Whether a cut has begun behind every call."""
        return all(count.begun >= count.sent for count in self._by_key.values())

    @property
    def is_saved(self) -> bool:
        """Whether every call is in a cut that is kept."""
        return all(count.saved >= count.sent for count in self._by_key.values())


class Cuts:
    """The cuts of one executor, or of those that follow each other in one place of a tree.

    Args:
        folder: Where they are kept; None for memory.
        together: Whether all ranks make one cut.
        limit: Seconds a rank may take to store its state; None for no limit.
        sealed: Whether what is given back must lie in memory: it travels on from there.

    Attributes:
        kept: Those that are kept.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        folder: Path | None,
        *,
        together: bool,
        limit: float | None = None,
        sealed: bool = False,
    ) -> None:
        self.kept = Kept(policy, folder, together=together, sealed=sealed)
        self._policy = policy
        self._limit = limit
        self._together = together
        self._lock = OwnedLock()
        self._open: dict[tuple[int, int], Cut] = {}  # by (wire id, rank)
        self._base = 0  # what wire ids are counted from
        self._last = 0  # the highest number so far
        self._counts = Counts()
        self._timer: Timer | None = None
        self._tell: Callable[[Any], None] = _nobody
        self._hub: Hub | None = None
        self._pid = os.getpid()

    def is_locked(self) -> bool:
        """Whether this thread is inside of them."""
        return self._lock.is_mine() or self.kept.is_locked()

    @property
    def limit(self) -> float | None:
        """Seconds a rank may take to store its state; None for no limit."""
        return self._limit

    @property
    def base(self) -> int:
        """What the number of a cut exceeds the wire id of its call by."""
        return self._base

    # --- the life of an executor --------------------------------------------------------------

    def open(self, hub: Hub, tell: Callable[[Any], None], *, can_reshard: bool, size: int) -> None:
        """Serve an executor of *size* ranks from now on, and claim the folder.

        Raises:
            SpecError: another executor uses it, or what is to be resumed from cannot be used.
        """
        with self._lock.asked():
            self._hub, self._tell = hub, tell
            self._last = max(self._last, self.kept.open())
            self._base = self._last
            self.kept.accept(size, can_reshard=can_reshard)

    def close(self, *, forget: bool) -> None:
        """Serve no more; *forget* gives back what lies in memory, and the folder."""
        with self._lock.asked():
            self._void(list(self._open.values()))
            self._stop_timer()
            self._counts.clear()
            self._hub, self._tell = None, _nobody
        self.prune(everything=True)
        if forget:
            self.kept.close()

    def __del__(self) -> None:
        # Its place in a tree has gone. A forked child has none of what is behind these numbers.
        if self._pid == os.getpid() and self.kept.is_held:
            self.close(forget=True)

    # --- under way (called under the plane's lock) --------------------------------------------

    def mark(self, call: Call, ranks: Collection[int], size: int) -> Collection[int]:
        """Return which of *ranks* are to store their state with *call*, which is being sent."""
        with self._lock.asked():
            if call.cuts is not None:
                call.cuts = self._begin(call.wire, ranks, size)
                return ranks
            marked = self._count(ranks, size)
            if marked:
                self._begin(call.wire, marked, size)
            seconds = self._policy.every_seconds
            if seconds is not None and len(marked) < len(ranks) and self._timer is None:
                assert self._hub is not None
                self._timer = self._hub.call_at(time.monotonic() + seconds, self._due)
            return marked

    def hear(self, rank: int, frame: Frame) -> None:
        """Take what *rank* has stored, or why it could not."""
        with self._lock.asked():
            cut = self._open.get((frame.call_id, rank))
            if cut is None:  # void since: somebody has died
                frame.drop()
                self.kept.note_stray()  # it may have left a file
                self._tell(CutsChanged())
            elif frame.kind == Kind.NOT_SAVED:
                failure = cut.failures[rank] = RemoteFailure.read(frame)
                self._tell(CutFailed(rank, cut.number, failure))
            elif frame.flags & Flag.LOST:
                frame.drop()  # its part is missing when it has answered
            elif isinstance(frame, FarFrame) and frame.fds:
                file = descriptors.own(frame.fds.pop())
                cut.parts[rank] = Part(file, os.fstat(file).st_size)
            else:
                with contextlib.suppress(Exception):  # the same
                    cut.parts[rank] = Part(-1, frame.value())

    def answered(self, rank: int, wire: int) -> None:
        """*rank* has answered the call *wire*."""
        with self._lock.asked():
            cut = self._open.pop((wire, rank), None)
            if cut is None:
                return
            cut.waiting.discard(rank)
            if cut.waiting:
                return
            if len(cut.parts) == len(cut.ranks):
                cut.end = "kept"
                cut.at = time.time()
                self.kept.add(cut)
                self._counts.save(cut.covers)
            else:
                cut.end = "failed"
                self.kept.discard(cut)
            self._tell(CutsChanged(cut if cut.end == "kept" else None))

    def abandon(self, wire: int) -> None:
        """The call *wire* did not reach every rank: not all will answer it."""
        with self._lock.asked():
            self._void([cut for (number, _), cut in self._open.items() if number == wire])

    def lose(self, ranks: Collection[int], *, everybody: bool) -> None:
        """*ranks* are gone, or are about to be stopped; what they had answered has been heard."""
        with self._lock.asked():
            lost = [cut for (_, rank), cut in self._open.items() if self._together or rank in ranks]
            self._void(lost)
            if everybody or not self._together:
                self._counts.forget([_GROUP] if self._together else ranks)
            if self._counts.is_begun:
                self._stop_timer()
            if lost:
                self._tell(CutsChanged())

    # --- afterwards ---------------------------------------------------------------------------

    def is_unsaved(self) -> bool:
        """Whether any call has been sent that no cut has in it."""
        with self._lock.asked():
            return not self._counts.is_saved

    def prune(self, *, everything: bool = False) -> None:
        """Remove what is not kept; *everything*: also what nobody knows of."""
        self.kept.prune(self._begun, everything=everything)

    def outcome(self, call: Call) -> Checkpoint:
        """Return what *call*, which was made for it and has been answered, has stored.

        Raises:
            Exception: what a rank raised instead.
        """
        with self._lock.asked():
            cuts = list(call.cuts or ())
            for cut in cuts:
                for rank, failure in sorted(cut.failures.items()):
                    error = failure.revive()
                    with contextlib.suppress(Exception):  # it may refuse further attributes
                        trace = failure.trace.rstrip()
                        error.add_note(f"raised by rank {rank} in checkpoint; remote:\n{trace}")
                    raise error
                if cut.end != "kept":
                    msg = f"snapshot {cut.number} did not arrive: {cut.end}"
                    raise RuntimeFault(msg)
            shown = [cut.show(self.kept.where) for cut in cuts]
        return Checkpoint(
            number=shown[0].number,
            ranks=tuple(rank for each in shown for rank in each.ranks),
            at=max(each.at for each in shown),
            size_bytes=sum(each.size_bytes for each in shown),
            where=self.kept.where,
        )

    # --- inside -------------------------------------------------------------------------------

    def _count(self, ranks: Collection[int], size: int) -> Collection[int]:
        """Count a call to *ranks*; return who is to store its state with it."""
        every = self._policy.every_calls
        if not self._together:
            return self._counts.add(ranks, every)
        if not self._counts.add([_GROUP], every):
            return ()
        if len(ranks) == size:
            return ranks
        # It goes to some ranks only: one with which all of them store their state follows behind.
        self._counts.begin([_GROUP])
        self._tell(CutDue())
        return ()

    def _begin(self, wire: int, ranks: Collection[int], size: int) -> list[Cut]:
        self._last = self._base + wire
        cuts: list[Cut] = []
        for each in [frozenset(ranks)] if self._together else [frozenset((r,)) for r in ranks]:
            covers = self._counts.begin([_GROUP] if self._together else each)
            cut = Cut(self._last, size, each, waiting=set(each), covers=covers)
            for rank in each:
                self._open[wire, rank] = cut
            cuts.append(cut)
        if self._counts.is_begun:
            self._stop_timer()
        return cuts

    def _begun(self) -> set[int]:
        """Return the numbers of the cuts that are under way."""
        with self._lock.asked():
            return {cut.number for cut in self._open.values()}

    def _void(self, cuts: Iterable[Cut]) -> None:
        for cut in cuts:
            if cut.end:
                continue
            cut.end = "void"
            for rank in cut.ranks:
                self._open.pop((cut.number - self._base, rank), None)
            self.kept.discard(cut)
            self._counts.void(cut.covers)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _due(self) -> None:
        """Have a cut taken because of the time; on the hub's thread."""
        with self._lock.asked():
            self._timer = None
            tell = _nobody if self._counts.is_begun else self._tell
        tell(CutDue())


_GROUP = -1


def _nobody(_notice: Any) -> None:
    """Tell nobody: no executor is served."""


_RETRIES = 3  # deaths in a row that one outlives; arbitrary


def saving_call(plane: Plane, seq: int, timeout: float | None, now: float) -> Call:
    """Return a call with which every rank stores its state."""
    if timeout is not None:
        check_timeout(timeout)
    terms = terms_of(now=now, timeout=timeout, on_death="retry", retries=_RETRIES)
    payload = plane.pack(encode((_nothing, (), dict[str, Any]()), "checkpoint"))
    call = Call(seq, "checkpoint", Shape.COLLECTIVE, [payload], terms)
    call.cuts = []
    return call


def save_now(plane: Plane, cuts: Cuts, call: Call, *, under_hold: bool = False) -> Checkpoint:
    """Have every rank store its state with *call*; return what has been stored.

    Args:
        plane: The group's.
        cuts: As above.
        call: Made by `saving_call`.
        under_hold: New calls are being held back, and this one is not.

    Raises:
        CallTimeout, WorkerDied, ExecutorClosed: as any call.
        Exception: what `WorkerActor.checkpoint` raised on a rank.
    """
    call.under_hold = under_hold
    try:
        plane.insert(call, first=under_hold)
        if not plane.wait(call, call.terms.deadline):
            plane.expire(call)
    except BaseException:
        plane.cancel(call)
        raise
    call.result()
    return cuts.outcome(call)


def cuts_of(spec: ExecutorSpec) -> Cuts | None:
    """Return what keeps the states of an executor's ranks, where they are to be kept."""
    if spec.checkpoint is None:
        return None
    together = spec.strategy is not Strategy.ONE_FOR_ONE
    limit = declared_limit(spec.worker.checkpoint, spec.hang_after)
    return Cuts(
        spec.checkpoint,
        spec.snapshots,
        together=together,
        limit=None if limit == math.inf else limit,
        sealed=spec.transport is not None,
    )


def _nothing(_worker: object) -> None:
    """Do nothing."""
