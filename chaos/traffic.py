"""The callers of a run, and the calls they make where a target brings none of its own.

Guarantees: the calls made here are of every shape, of both modes, small and large, alone and in
a row, streams, and some that nobody waits for; each that is waited for has a deadline. Their
answers are checked. What a call may end with under faults is no complaint; what no fault of the
run explains is.

Left to others: whether calls were run as they should (`checker`).
"""

from __future__ import annotations

import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from phalanx.supervision import (
    CallTimeout,
    ChildRefused,
    ExecutorClosed,
    LockTimeout,
    MessageTooLarge,
    PhalanxError,
    RemoteError,
    RuntimeFault,
    StartFailed,
    SupervisorDown,
    WorkerDied,
)

from .journal import now
from .orders import InjectedError, UnpicklableError
from .referee_records import Complained

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from phalanx.actors import Executor, WorkerActor

    from .journal import Journal
    from .target import Traffic

_LARGE_BYTES = 256 << 10
_ROW = 6  # calls in a row
_MOST_COMPLAINTS = 20
_BREATH = 0.02  # seconds between a caller's rounds: a history of minutes must still fit into memory
_PAUSE = 0.05  # seconds before a caller looks again for a group that is being built anew
_OF_TORCH = ("gloo", "nccl", "NCCL", "Connection closed", "process group")
_OF_FAULTS = (WorkerDied, CallTimeout, LockTimeout, StartFailed, RuntimeFault)
_OF_TREES = (SupervisorDown, ChildRefused)  # while a group is being built anew


class Mismatch(AssertionError):
    """An answer was not what the call asked for."""


def echo(worker: WorkerActor, token: int, seconds: float, load: bytes) -> tuple[int, int, int]:
    """Take *seconds*, and return whose answer this is, to what, and how much came with it."""
    time.sleep(seconds)
    return worker.ctx.rank, token, len(load)


def echoes(worker: WorkerActor, token: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield *count* items, each of which says whose it is, of what, and which."""
    for index in range(count):
        yield worker.ctx.rank, token, index


def make_calls(executor: Executor[Any], chance: random.Random, timeout: float) -> None:
    """Make one round of calls and check their answers."""
    time.sleep(_BREATH)
    token = chance.getrandbits(60)
    load = bytes(_LARGE_BYTES) if chance.random() < 0.05 else b""
    args = (token, chance.choice((0.0, 0.001, 0.005)), load)
    every: list[tuple[int, int, int]]
    every = [(rank, token, len(load)) for rank in range(executor.world_size)]
    rank = chance.randrange(executor.world_size)
    on_death: Any = chance.choice(("fail", "retry"))
    limit: dict[str, Any] = {"timeout": timeout, "args": args, "on_timeout": "restart"}
    shape = chance.random()
    if shape < 0.04:
        executor.tell(echo, args, rank=chance.choice((None, rank)))
    elif shape < 0.1:
        _check_stream(executor, timeout, token)
    elif shape < 0.35:
        _check(executor.collective_rpc(echo, **limit, on_death=on_death, retries=3), every)
    elif shape < 0.5:
        _check_row(executor, limit, every, on_death)
    elif shape < 0.65:
        for outcome in executor.gather(echo, timeout, args):
            if outcome.ok:
                _check(outcome.value, every[outcome.rank])
    elif shape < 0.85:
        _check(executor.call(rank, echo, **limit, on_death=on_death), every[rank])
    else:
        future = executor.submit(echo, args, timeout=timeout, on_death=on_death)
        answer: tuple[int, int, int] = future.result()
        _check(answer, every[answer[0]])


def _check_stream(executor: Executor[Any], timeout: float, token: int) -> None:
    """Take what every rank yields: each item once, in the order of its rank."""
    taken = dict.fromkeys(range(executor.world_size), 0)
    for rank, item in executor.stream(echoes, timeout, (token, _ROW)):
        _check(item, (rank, token, taken[rank]))
        taken[rank] += 1
    _check(taken, dict.fromkeys(taken, _ROW))


def _check_row(
    executor: Executor[Any],
    limit: dict[str, Any],
    every: list[tuple[int, int, int]],
    on_death: Any,
) -> None:
    """Make several calls at once, so that some wait behind others."""
    futures = [
        executor.collective_rpc(echo, **limit, on_death=on_death, non_block=True)
        for _ in range(_ROW)
    ]
    failed: BaseException | None = None
    for future in futures:
        try:
            _check(future.result(), every)
        except (PhalanxError, InjectedError, MemoryError) as error:
            failed = error
    if failed is not None:
        raise failed


def _check(found: object, expected: object) -> None:
    if found != expected:
        msg = f"answered {found!r}, where {expected!r} was asked for"
        raise Mismatch(msg)


def complain(journal: Journal, error: BaseException) -> None:
    """Write down that *error* should not have been."""
    trace = "".join(traceback.format_exception(error))
    what = f"{type(error).__name__}: {error}"[:500]
    journal.write(Complained(at=now(), error=what, trace=trace[-4000:]))


class Callers:
    """Threads that make calls until they are told to stop.

    Args:
        handle: Returns what traffic is given, or None while there is nothing to call.
    """

    def __init__(
        self,
        handle: Callable[[], Any],
        traffic: Traffic,
        chances: list[random.Random],
        journal: Journal,
        explained: frozenset[str],
    ) -> None:
        self._handle = handle
        self._traffic = traffic
        self._journal = journal
        self._explained = explained
        self._stop = threading.Event()
        self._complaints = 0
        self.rounds = 0
        self._threads = [
            threading.Thread(
                target=self._run, args=(chance,), name=f"chaos-caller-{i}", daemon=True
            )
            for i, chance in enumerate(chances)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Make no further round."""
        self._stop.set()

    def waiting(self) -> list[str]:
        """Return the names of those that are still waiting for an answer."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _run(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            handle = self._handle()
            if handle is None:
                self._stop.wait(_PAUSE)
                continue
            try:
                self._traffic(handle, chance)
            except ExecutorClosed:
                self._stop.wait(_PAUSE)
            except BaseException as error:  # noqa: BLE001  # whatever it is, it is told
                if not self._is_explained(error):
                    self._complain(error)
                elif isinstance(error, _OF_TREES):
                    self._stop.wait(_PAUSE)
            self.rounds += 1

    def _complain(self, error: BaseException) -> None:
        """Write down what is wrong, unless that was done often enough."""
        self._complaints += 1
        if self._complaints > _MOST_COMPLAINTS:
            return
        complain(self._journal, error)

    def _is_explained(self, error: BaseException) -> bool:
        """Whether *error* is what a call may end with, given the faults of the run."""
        if isinstance(error, RemoteError):
            return UnpicklableError.__name__ in str(error) and "unpicklable" in self._explained
        if isinstance(error, InjectedError):
            return bool({"raise", "raise_before", "unpicklable"} & self._explained)
        if isinstance(error, _OF_FAULTS):
            return True
        if isinstance(error, MessageTooLarge):
            return bool({"large", "memory"} & self._explained)
        if isinstance(error, MemoryError):
            return "memory" in self._explained
        if not self._explained:
            return False
        if isinstance(error, PhalanxError):
            return isinstance(error, _OF_TREES)
        # What ranks in a process group raise when another is gone.
        is_of_torch = type(error).__module__.partition(".")[0] == "torch"
        return is_of_torch or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_TORCH)
        )
