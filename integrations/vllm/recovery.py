"""`Recovery`: brings an engine's new workers to the state of those before them, and makes its RPCs.

Guarantees: one thread replays and calls, in the order of submission, so that no call is missing
from the journal and none is made by half-restored workers; a replay that raises or lasts longer
than a start may is a failed start; a caller's timeout bounds all of it. Where weights may have been
changed by calls that are not replayed, no step and no call runs on new workers before a hook of the
user's has set them. Needs nothing of vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.runtime import GroupDown, GroupUp
from phalanx.supervision import (
    GPU_WORKER,
    BadArguments,
    CallTimeout,
    Directive,
    ExecutorClosed,
    UnknownMethod,
    WorkerDied,
)

from .journal import REPEATABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.actors import Executor

    from .engine_state import EngineState
    from .journal import Journal

_logger = logging.getLogger("vllm.phalanx")


class StaleEpoch(Exception):
    """The call was made for workers that are gone."""


class NotRestored(Exception):
    """A worker could not be brought to the state of the one before it; it is restarted for that."""


@dataclass(frozen=True)
class WeightsLost:
    """The argument of ``on_weights_lost``: workers with the weights of the engine's start.

    Attributes:
        epoch: Theirs; each restart has a higher one.
        methods: Names of the calls that may have changed weights, and have not been made again.
        call: ``call(method, *args, **kwargs)`` calls a method of vLLM's worker on every rank, and
            returns their answers. It raises if one dies; the hook is then called anew.
    """

    epoch: int
    methods: tuple[str, ...]
    call: Callable[..., list[Any]]


class Recovery:
    """The state of one engine's workers.

    Args:
        group: The workers.
        limit: Seconds that a replay may take, and as many the hook.
        state: The state that is reported to the client.
        most: How many restarts in a row may pass without an output of a step.
        hook: Sets weights that have been lost; None ends the engine instead.
        ended: Returns the error of calls to an engine that has ended for good, for the given reason
            or, if that is empty, for the group's.

    Attributes:
        epoch: The latest epoch whose workers have been restored.
        down: The latest one of which a worker has died.
    """

    def __init__(
        self,
        group: Executor[Any],
        journal: Journal,
        *,
        limit: float,
        ended: Callable[[str], Exception],
        state: EngineState,
        most: int,
        hook: Callable[[WeightsLost], object] | None = None,
    ) -> None:
        self._group = group
        self._hook = hook
        self._hooked: tuple[int, Future[object]] | None = None
        self._journal = journal
        self._limit = limit
        self._ended = ended
        self._state = state
        self._most = most
        self._row = 0  # epochs that went down since `end_row`
        self.down = 0
        self._up_at = float("inf")
        self._replayed_in = 0.0
        self._cause = ""
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phalanx-heal")
        self._hook_turn = threading.Lock()
        self.epoch: int = self._ask_epoch(None)  # its workers are as new as the journal
        self._unsubscribe = group.subscribe(weakly(self._on_event))

    def restore(self) -> int:
        """Return the epoch of the workers, once they are restored."""
        epoch: int = self._submit(self._restore, None).result()
        return epoch

    def call(
        self,
        method: str | bytes,
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        non_block: bool,
        name: str = "",
    ) -> Any:
        """Make one RPC, with all that precedes it, within *timeout* seconds; None for no limit.

        *name* is that of a callable, for messages.
        """
        until = None if timeout is None else time.monotonic() + timeout
        future: Future[Any] = self._submit(self._call, method, until, args, kwargs, name)
        if non_block:
            return future
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.cancel():
                raise _late(name or method, timeout) from None
            return future.result()  # it has the same limit

    def end_row(self) -> None:
        """Note that a step had an output, or that what killed the workers has ended."""
        self._row = 0

    def close(self) -> None:
        """End the thread; the group is closed, so what it does and is to do ends with an error."""
        self._unsubscribe()
        self._closed = True
        if self._hooked is not None:
            self._hooked[1].cancel()  # the thread may be waiting for a hook that never returns
        self._thread.shutdown()

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            return self._thread.submit(function, *args)
        except RuntimeError as error:  # it has been closed
            raise self._ended("") from error

    def _call(
        self,
        method: str | bytes,
        until: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
    ) -> Any:
        repeats = method in REPEATABLE
        while True:
            epoch = self._restore(until)
            try:
                answers = self._group.collective_rpc(
                    "rpc",
                    _left(until, method),
                    args=(epoch, method, args, kwargs),
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
            except (UnknownMethod, BadArguments):
                raise  # it has not begun
            except Exception as error:
                # It may still run, or have had a part of its effect. Workers that this error ends
                # take that with them.
                never_sent = isinstance(error, CallTimeout) and not error.sent
                if not never_sent and GPU_WORKER.directive(error) is not Directive.RESTART:
                    self._journal.note_possible_update(name or str(method))
                raise
            if not repeats:
                self.end_row()
            self._journal.note(method, args, kwargs, answers, name=name)
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
        lost = self._journal.lost
        if lost and self._hook is None:
            # The engine would serve the weights of its start under the version of the last ones.
            raise self._ended(
                f"weights may have been set by {', '.join(lost)}, and died with its workers: "
                "name these in the policy's replay or harmless, or set on_weights_lost"
            )
        began = time.monotonic()
        entries = self._journal.entries()
        is_start = left is None or left >= self._limit
        try:
            self._group.collective_rpc(
                "prepare",
                self._limit if is_start else left,
                args=(epoch, entries),
                retries=1,
                on_timeout="restart" if is_start else "leave",
            )
            if lost:
                self._set_weights(epoch, lost, until)
        except CallTimeout as error:
            if not is_start:
                raise
            raise StaleEpoch(f"epoch {epoch} was not restored after {self._limit:g} s") from error
        self.epoch = epoch
        self._replayed_in = time.monotonic() - began

    def _set_weights(self, epoch: int, lost: list[str], until: float | None) -> None:
        """Have the hook set the weights of the workers of *epoch*; it is called once for them."""
        if self._hooked is None or self._hooked[0] != epoch:
            news = WeightsLost(epoch, tuple(lost), partial(self._call_for_hook, epoch))
            self._hooked = epoch, Future()
            run = partial(self._run_hook, self._hooked[1], news)
            if self._closed:  # before there was anything to cancel
                self._hooked[1].cancel()
            else:  # a daemon: the program's end does not wait for a hook that never returns
                threading.Thread(target=run, name="phalanx-weights", daemon=True).start()
        done, left = self._hooked[1], _left(until, "on_weights_lost")
        try:
            done.result(self._limit if left is None else min(left, self._limit))
        except Exception as error:
            # Of workers of the user's own these end the engine, like any other.
            of_workers = isinstance(error, WorkerDied | StaleEpoch | ExecutorClosed)
            if of_workers and self._ask_epoch(until) != epoch:
                raise StaleEpoch(f"epoch {epoch} has ended") from error
            if not done.done() and left is not None and left < self._limit:
                raise _late("on_weights_lost", left) from error
            why = f"raised {error!r}" if done.done() else f"took more than {self._limit:g} s"
            raise self._ended("" if done.cancelled() else f"on_weights_lost {why}") from error

    def _run_hook(self, done: Future[object], news: WeightsLost) -> None:
        assert self._hook is not None
        try:
            with self._hook_turn:  # the one before may not have noticed that its workers died
                value = self._hook(news)
        except BaseException as error:  # noqa: BLE001  # it is what the hook came to
            settle = partial(done.set_exception, error)
        else:
            settle = partial(done.set_result, value)
        with suppress(InvalidStateError):  # it has been closed
            settle()

    def _call_for_hook(self, epoch: int, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        given = (epoch, method, args, kwargs)
        return list(self._group.collective_rpc("rpc", self._limit, args=given))

    def _ask_epoch(self, until: float | None) -> int:
        epoch: int = self._group.collective_rpc(
            "epoch", _left(until, "epoch"), unique_reply_rank=0, retries=1
        )
        return epoch

    def _on_event(self, event: object) -> None:
        if isinstance(event, GroupDown):
            self._cause = event.cause
            if time.monotonic() - self._up_at > self._limit:  # they were idle
                self._row = 0
            self._up_at = float("inf")
            self._row += event.epoch != self.down  # more than one rank may die in an epoch
            self.down = event.epoch
            self._state.set("recovering", event.cause)  # after that: see `_resume`
            gives_up = self._group.status().phase in ("closing", "ended")  # with its own reason
            if self._row > self._most and not gives_up:
                self._ended(f"more than {self._most} restarts in a row without a result between")
        elif isinstance(event, GroupUp):
            # Now, and not with the next request. This thread may not block.
            with suppress(RuntimeError):  # it has been closed, or the program ends
                self._thread.submit(self._resume, event).add_done_callback(self._report_error)

    def _resume(self, up: GroupUp) -> None:
        """Restore the workers of which *up* tells, and tell it."""
        self._restore(None)
        self._state.add(recoveries=1, restart=up.took, restore=self._replayed_in)
        if up.epoch > self.down:  # they have not died since
            self._up_at = time.monotonic()
            self._state.set("serving")
            if up.epoch <= self.down:  # they have, while that was written
                self._up_at = float("inf")
                self._state.set("recovering", self._cause)
        _logger.warning(
            "phalanx.vllm_recovered epoch=%d restart=%.3f restore=%.3f cause=%r",
            *(up.epoch, up.took, self._replayed_in, self._cause),
        )

    def _report_error(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None and not self._closed:  # the next step raises it too
            _logger.error("phalanx.vllm_heal_failed %s: %s", type(error).__name__, error)


def weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what calls a bound *method*, and keeps its object from no garbage collection."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        if (bound := reference()) is not None:
            bound(argument)

    return call


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
