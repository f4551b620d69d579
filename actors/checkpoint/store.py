"""Snapshot store: what is kept, and what a new incarnation is given.

The cuts that are kept of one executor's ranks, and what is left of those that are not.

Guarantees: the newest good one is given back, and an older one where that turns out to be damaged;
at most *keep* of any rank stay, besides those that were kept since anybody last trimmed them;
nothing of what is not kept stays in memory or in the folder once `prune` has run.

Left to others: which cuts are worth keeping (`cuts`), files (`runtime.snapshots`,
`runtime.snapshot_folder`). May be used from any thread; its lock is taken last, and under it nobody
is waited for.

What a new incarnation is given back: a part of a cut, or all of one.

Guarantees: a part that lies in a folder has been read and found whole before it is given.

Left to others: which cut it is (`kept`), the way to the worker (`members`).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import OwnedLock, SnapshotFolder, join_snapshots
from phalanx.supervision import RuntimeFault, SpecError

from .snapshot import find_cuts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from phalanx.actors.spec.checkpoint_policy import Checkpoint, CheckpointPolicy

    from .snapshot import Cut


@dataclass(frozen=True, slots=True)
class Gift:
    """What a new incarnation is given back.

    Attributes:
        file: The descriptor it lies behind.
        is_spread: Whether it is all of a cut that was taken with another number of ranks.
        spans: Where in it (start, size) the parts lie: the rank's own, or all there are.
    """

    number: int
    at: float
    file: int
    spans: tuple[tuple[int, int], ...]
    is_spread: bool = False

    @property
    def age(self) -> float:
        """Seconds since it was complete."""
        return max(0.0, time.time() - self.at)

    def close(self) -> None:
        """Let go of it, once it has been sent."""
        os.close(self.file)


def give(
    cut: Cut,
    folder: SnapshotFolder | None,
    ranks: Iterable[int],
    *,
    spread: bool,
    sealed: bool = False,
) -> dict[int, Gift]:
    """Return what each of *ranks* gets of *cut*; it is theirs to close.

    Args:
        cut: As above.
        folder: Where it lies; None for memory.
        ranks: As above.
        spread: Whether each gets all of it.
        sealed: Whether what lies in a folder must be brought into memory: it travels on.

    Raises:
        ValueError: a part of it is damaged.
    """
    opened: dict[int, int] = {}
    try:
        for rank in sorted(cut.ranks) if spread else ranks:
            if folder is None:
                opened[rank] = os.dup(cut.parts[rank].file)
            else:
                opened[rank] = folder.open(cut.name(rank))
        files = {rank: (file, os.fstat(file).st_size) for rank, file in opened.items()}
        if sealed and folder is not None and not spread:
            for rank, (file, size) in list(files.items()):
                opened[rank], _ = join_snapshots([(file, size)])
                files[rank] = opened[rank], size
                os.close(file)
        if not spread:
            opened.clear()
            return {
                rank: Gift(cut.number, cut.at, file, ((0, size),))
                for rank, (file, size) in files.items()
            }
        whole, spans = join_snapshots(list(files.values()))
        opened[-1] = whole
        return {
            rank: Gift(cut.number, cut.at, os.dup(whole), spans, is_spread=True) for rank in ranks
        }
    finally:
        for file in opened.values():
            os.close(file)


_BACKLOG = 64  # cuts that may be kept too many; each costs descriptors


class Kept:
    """What is kept, for one executor or for those that follow each other in one place of a tree.

    Args:
        path: The folder; None for memory.
        together: Whether all ranks make one cut.
        sealed: Whether what is given back must lie in memory: it travels on from there.
    """

    def __init__(
        self, policy: CheckpointPolicy, path: Path | None, *, together: bool, sealed: bool
    ) -> None:
        self._policy = policy
        self._path = path
        self._together = together
        self._sealed = sealed
        self._lock = OwnedLock()
        self._folder: SnapshotFolder | None = None
        self._cuts: list[Cut] = []  # by number
        self._gone: list[Cut] = []  # what is left of them is to be removed
        self._stray = False  # whether there may be files of others
        self._bound = _BACKLOG
        self._foreign = 0  # up to here what is in the folder is none of ours

    def is_locked(self) -> bool:
        """Whether this thread is inside of them."""
        return self._lock.is_mine()

    @property
    def where(self) -> str:
        """The folder; empty for memory."""
        return "" if self._path is None else str(self._path)

    @property
    def is_held(self) -> bool:
        """Whether memory or a folder is held, which `close` gives back."""
        return bool(self._cuts) or self._folder is not None

    # --- the life of an executor --------------------------------------------------------------

    def open(self) -> int:
        """Claim the folder, unless that was done; return the highest number there, or 0.

        Raises:
            SpecError: another executor uses it, or what is to be resumed from cannot be used.
        """
        if self._path is None or self._folder is not None:
            return 0
        self._folder = SnapshotFolder(self._path)
        self._folder.tidy()
        names = self._folder.names()
        last = max((name.number for name in names), default=0)
        self._foreign = last  # until it is known that it can be used
        if self._policy.resume:
            self._cuts = find_cuts(self._folder, names, together=self._together)
            if names and not self._cuts:
                raise SpecError(
                    "checkpoint.resume",
                    self.where,
                    f"of {len(names)} snapshots there, none is complete; "
                    "to begin anew, give another folder",
                )
        return last

    def accept(self, size: int, *, can_reshard: bool) -> None:
        """Take what there is for that of an executor of *size* ranks.

        Raises:
            SpecError: it is that of another number of ranks, and cannot be resharded.
        """
        if self._together and not can_reshard:
            self._check_size(size)
        if self._policy.resume:
            self._foreign = 0

    def close(self) -> None:
        """Give back what lies in memory, and the folder."""
        with self._lock.asked():
            kept, self._cuts = self._cuts, []
            folder, self._folder = self._folder, None
        for cut in kept:
            cut.close()
        if folder is not None:
            folder.close()

    # --- what is kept -------------------------------------------------------------------------

    def add(self, cut: Cut) -> None:
        """Keep *cut*, the newest."""
        with self._lock.asked():
            self._cuts.append(cut)
            if len(self._cuts) > self._bound:
                self._trim()  # whoever prunes is busy with a death

    def discard(self, cut: Cut) -> None:
        """Remove the files of *cut*, and have its memory given back.

        The files at once: a caller who is told next that the call has failed may end the driver,
        and what is resumed from then must not have that call in it. A rank that is stopped later
        may still write its part, but one that has died never does: so a whole cut is never left.
        """
        with self._lock.asked():
            self._gone.append(cut)
            if self._folder is not None and self._folder.remove(map(cut.name, cut.ranks)):
                self._folder.sync()

    def note_stray(self) -> None:
        """Have the folder looked through for files that nobody knows of."""
        with self._lock.asked():
            self._stray = True

    def latest(self, rank: int | None = None) -> Checkpoint | None:
        """Return the newest that is kept and good: of *rank*, or of any."""
        with self._lock.asked():
            any_rank = rank is None or self._together
            good = (
                cut
                for cut in reversed(self._cuts)
                if not (cut.bad or cut.damaged) and (any_rank or rank in cut.ranks)
            )
            cut = next(good, None)
            return None if cut is None else cut.show(self.where)

    def prune(self, begun: Callable[[], set[int]], *, everything: bool = False) -> None:
        """Remove what is not kept: memory, and files.

        Args:
            begun: Returns the numbers of the cuts that are under way.
            everything: Also what nobody knows of.
        """
        folder = self._folder
        with self._lock.asked():
            self._trim()
            gone, self._gone = self._gone, []
            stray, self._stray = self._stray or everything, False
        for cut in gone:
            cut.close()
        if folder is None or not (gone or stray):
            return
        # In this order: what is begun later is not among the names, and what is kept later was
        # begun before.
        try:
            names = folder.names()
        except OSError:
            self.note_stray()  # a disk that cannot be read just now; the next time may be better
            return
        under_way = begun()
        with self._lock.asked():
            kept = {(cut.number, rank) for cut in self._cuts for rank in cut.ranks}
        folder.remove(
            name
            for name in names
            if name.number > self._foreign
            and name.number not in under_way
            and (name.number, name.rank) not in kept
        )

    # --- what is given back -------------------------------------------------------------------

    def choose(
        self, ranks: Iterable[int], size: int, reject: Callable[[int, str], None]
    ) -> Mapping[int, Gift]:
        """Return what each of *ranks* is given back, in a group of *size*; closing it is theirs.

        A rank that has no entry begins anew: nothing was ever kept of it.

        Args:
            ranks: Those that are about to be started, together.
            size: As above.
            reject: Told the number of a cut that turns out to be damaged, and how it is.

        Raises:
            RuntimeFault: there were snapshots, and none of them can be used.
        """
        ranks = list(ranks)
        if self._together:
            return self._choose(ranks, size, reject)
        gifts: dict[int, Gift] = {}
        try:
            for rank in ranks:
                gifts |= self._choose([rank], size, reject)
        except BaseException:
            for gift in gifts.values():
                gift.close()
            raise
        return gifts

    def reject(self, rank: int, number: int) -> bool:
        """Use *rank*'s cut *number* no more, as long as there is another; False if that was so."""
        with self._lock.asked():
            for cut in self._cuts:
                if cut.number == number and (self._together or rank in cut.ranks) and not cut.bad:
                    cut.bad = True
                    return True
        return False

    def _trim(self) -> None:
        """Keep no more than was asked for, and set aside what is older than that many good ones."""
        excess: set[int] = set()
        good: dict[frozenset[int] | None, int] = {}
        for cut in reversed(self._cuts):
            whose = None if self._together else cut.ranks
            if good.get(whose, 0) >= self._policy.keep:
                excess.add(id(cut))
                self._gone.append(cut)
                for part in cut.parts.values():
                    part.close()
            elif not (cut.bad or cut.damaged):
                good[whose] = good.get(whose, 0) + 1
        self._cuts = [cut for cut in self._cuts if id(cut) not in excess]
        self._bound = len(self._cuts) + _BACKLOG

    def _check_size(self, size: int) -> None:
        if self._cuts and self._cuts[-1].world_size != size:
            had = self._cuts[-1].world_size
            raise SpecError(
                "world_size",
                size,
                f"what is kept is the state of {had} ranks; start as many, or give the worker "
                "class a method reshard(states)",
            )

    def _choose(
        self, ranks: list[int], size: int, reject: Callable[[int, str], None]
    ) -> dict[int, Gift]:
        with self._lock.asked():
            kept = [cut for cut in self._cuts if self._together or ranks[0] in cut.ranks]
        if not kept:
            return {}
        # The newest that is good; of those that are not, the oldest.
        for cut in (*reversed([cut for cut in kept if not cut.bad]), *(c for c in kept if c.bad)):
            if cut.damaged:
                continue
            try:
                spread = self._together and cut.world_size != size
                return give(cut, self._folder, ranks, spread=spread, sealed=self._sealed)
            except ValueError as error:
                cut.damaged = True
                reject(cut.number, str(error))
        msg = f"there are {len(kept)} snapshots in {self.where or 'memory'}, all of them damaged"
        raise RuntimeFault(msg)
