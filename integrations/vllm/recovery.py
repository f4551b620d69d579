"""`Recovery`: brings an engine's new workers to the state of those before them, and makes its RPCs.

Guarantees: one thread replays and calls, in the order of submission, so that no call is missing
from the journal and none is made by half-restored workers; replay begins as soon as the group is
up; a replay that raises or lasts longer than a start may is a failed start; a caller's timeout
bounds all of it. Needs nothing of vLLM.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phalanx.runtime import GroupUp
from phalanx.supervision import CallTimeout, ExecutorClosed, WorkerDied

from .journal import REPEATABLE, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors import Executor

    from .journal import Journal

_FORGOTTEN = (
    "phalanx.vllm_calls_forgotten methods=%s: what these changed in the workers that died is lost; "
    "if any changed what a worker computes, name it in the policy's replay"
)
_logger = logging.getLogger("vllm.phalanx")


class StaleEpoch(Exception):
    """The call was made for workers that are gone."""


class NotRestored(Exception):
    """A worker could not be brought to the state of the one before it; it is restarted for that."""


class Recovery:
    """The state of one engine's workers.

    Args:
        group: The workers.
        limit: Seconds that a replay may take.
        ended: Returns the error of calls to an engine that has ended for good, for the given reason
            or, if that is empty, for the group's.

    Attributes:
        epoch: The latest epoch whose workers have been restored.
        is_replaying: Whether some are being restored.
    """

    def __init__(
        self,
        group: Executor[Any],
        journal: Journal,
        *,
        limit: float,
        ended: Callable[[str], Exception],
    ) -> None:
        self._group = group
        self._journal = journal
        self._limit = limit
        self._ended = ended
        self.is_replaying = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phalanx-heal")
        self.epoch: int = self._ask_epoch(None)  # its workers are as new as the journal
        self._unsubscribe = group.subscribe(self._on_event)

    def restore(self) -> int:
        """Return the epoch of the workers, once they are restored."""
        return self._thread.submit(self._restore, None).result()

    def call(
        self,
        method: str | bytes,
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rank: int | None,
        *,
        non_block: bool,
    ) -> Any:
        """Make one RPC, with all that precedes it, within *timeout* seconds; None for no limit."""
        until = None if timeout is None else time.monotonic() + timeout
        future: Future[Any]
        future = self._thread.submit(self._call, method, until, args, kwargs, rank)
        if non_block:
            return future
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.cancel():
                raise _late(method, timeout) from None
            return future.result()  # it has the same limit

    def close(self) -> None:
        """End the thread; the group is closed, so what it does ends with an error."""
        self._unsubscribe()
        self._thread.shutdown(cancel_futures=True)

    def _call(
        self,
        method: str | bytes,
        until: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rank: int | None,
    ) -> Any:
        repeats = method in REPEATABLE
        while True:
            epoch = self._restore(until)
            try:
                answers = self._group.collective_rpc(
                    "rpc",
                    _left(until, method),
                    args=(epoch, method, args, kwargs, rank),
                    unique_reply_rank=rank,
                    retries=int(repeats),  # by the next workers, which find that it is stale
                )
            except StaleEpoch:
                continue  # nothing of it counts
            except WorkerDied:
                if repeats:
                    continue
                raise
            except ExecutorClosed as error:
                raise self._ended("") from error
            listed = tuple(answers) if isinstance(answers, list) else (answers,)
            self._journal.note(method, args, kwargs, listed)
            return answers

    def _restore(self, until: float | None) -> int:
        while True:
            try:
                epoch = self._ask_epoch(until)
                if epoch != self.epoch:
                    self._replay(epoch, until)
            except (WorkerDied, StaleEpoch):
                continue
            except ExecutorClosed as error:
                raise self._ended("") from error
            return epoch

    def _replay(self, epoch: int, until: float | None) -> None:
        left = _left(until, "replay")
        if lost := WEIGHTS.intersection(self._journal.forgotten):
            # The engine would serve the weights of its start under the version of the last ones.
            raise self._ended(f"the weights set by {', '.join(sorted(lost))} died with its workers")
        entries = self._journal.entries()
        is_start = left is None or left >= self._limit
        self.is_replaying = True
        try:
            self._group.collective_rpc(
                "prepare",
                self._limit if is_start else left,
                args=(epoch, entries),
                retries=1,
                on_timeout="restart" if is_start else "leave",
            )
        except CallTimeout as error:
            if not is_start:
                raise
            msg = f"epoch {epoch} was not restored after {self._limit:g} s"
            raise StaleEpoch(msg) from error
        finally:
            self.is_replaying = False
        self.epoch = epoch
        if forgotten := self._journal.forgotten:
            _logger.warning(_FORGOTTEN, ", ".join(forgotten))

    def _ask_epoch(self, until: float | None) -> int:
        epoch: int = self._group.collective_rpc(
            "epoch", _left(until, "epoch"), unique_reply_rank=0, retries=1
        )
        return epoch

    def _on_event(self, event: object) -> None:
        if isinstance(event, GroupUp) and event.epoch != self.epoch:
            # Now, and not with the next request. This thread may not block.
            with suppress(RuntimeError):  # it has been closed, or the program ends
                self._thread.submit(self._restore, None).add_done_callback(_complain)


def _complain(done: Future[int]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:  # the next step raises it too
        _logger.error("phalanx.vllm_heal_failed %s: %s", type(error).__name__, error)


def _left(until: float | None, method: str | bytes) -> float | None:
    if until is None:
        return None
    left = until - time.monotonic()
    if left <= 0:
        raise _late(method, 0.0)
    return left


def _late(method: str | bytes, timeout: float | None) -> CallTimeout:
    name = method if isinstance(method, str) else "a callable"
    return CallTimeout(name, (), timeout or 0.0, sent=False)
