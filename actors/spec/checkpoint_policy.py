"""`CheckpointPolicy`: when the ranks' state is taken and where it is kept; checkpoint events.

A policy is valid once it is built.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast

from phalanx.runtime import Event
from phalanx.supervision import SpecError, check_count, check_kind, check_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When an executor takes the state of its ranks, and where it keeps that.

    The value of a worker's `checkpoint` is taken between calls, before the call that made it due is
    answered: with ``every_calls=1`` every answered call is in the state that a later incarnation
    gets. States of ranks under one_for_all or rest_for_one are taken together, at the same call,
    and restored together; those of independent ones (one_for_one) separately.

    Attributes:
        every_calls: Take it with every so many calls. None: not by calls.
        every_seconds: Take it so many seconds after the first call that no snapshot contains.
            Nothing is taken while nothing is called. None: not by time.
        where: The folder to keep it in, for this executor alone; created if it is missing, and
            readable by no other user. None keeps it in memory, until the executor ends.
        keep: The number of snapshots of each rank that are kept, at least 1. The older ones are
            used if a newer one is damaged, or cannot be restored.
        resume: Whether a new executor begins with the newest good snapshot that it finds in
            *where*, if there is any.

    With neither *every_calls* nor *every_seconds* it is taken by `Executor.checkpoint` alone.
    """

    every_calls: int | None = None
    every_seconds: float | None = None
    where: str | os.PathLike[str] | None = None
    keep: int = 2
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every_calls is not None:
            check_count("checkpoint.every_calls", self.every_calls)
        check_limit("checkpoint.every_seconds", self.every_seconds)
        if not isinstance(cast("object", self.where), str | os.PathLike | None):
            raise SpecError("checkpoint.where", self.where, "give a folder, or None")
        check_count("checkpoint.keep", self.keep)
        check_kind("checkpoint.resume", self.resume, bool)
        if self.resume and self.where is None:
            raise SpecError(
                "checkpoint.resume", self.resume, "needs a folder (where) to find snapshots in"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of some ranks, as it is kept.

    Attributes:
        number: Later ones have higher ones.
        ranks: The ranks of which it is the state.
        at: When it was complete, in seconds since 1970.
        size_bytes: Its total size.
        where: The folder that holds it; empty for memory.
    """

    number: int
    ranks: tuple[int, ...]
    at: float
    size_bytes: int
    where: str


class CheckpointTaken(Event, event="checkpoint_taken", level="debug"):
    """The state of all the ranks that belong together is kept.

    `Executor.subscribe` delivers each; the log has no more than one in a second.

    Attributes:
        took: Seconds from the sending of the call with which it was due.
    """

    group: str
    checkpoint: Checkpoint
    took: float


class CheckpointFailed(Event, event="checkpoint_failed", level="error"):
    """A rank's state could not be taken; the call went on, and older snapshots are kept.

    Attributes:
        number: The snapshot that is none.
        trace: The worker's traceback.
    """

    group: str
    rank: int
    number: int
    error: str
    trace: str


class CheckpointRestored(Event, event="checkpoint_restored", level="info"):
    """A rank has been given back the state of an earlier incarnation.

    Attributes:
        age: Seconds since it was complete.
        took: Seconds that restoring it took.
    """

    group: str
    rank: int
    incarnation: int
    number: int
    age: float
    took: float = 0.0


class CheckpointRejected(Event, event="checkpoint_rejected", level="warning"):
    """A snapshot will not be used, as long as there is another.

    Attributes:
        why: It is torn, missing, altered, or a rank could not be restored from it.
    """

    group: str
    number: int
    why: str
