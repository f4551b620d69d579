"""The generator of calls: the caller threads of a run, and the built-in traffic.

Guarantees: the built-in calls are of every shape and both modes, small and large, single and
pipelined, streams and tells; each that is waited for has a timeout. Their results are checked. An
error that the faults of the run explain is an outcome; any other is recorded.
"""

from __future__ import annotations

import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from phalanx.chaos.history.events import WorkloadFailed
from phalanx.chaos.history.journal import now
from phalanx.chaos.nemesis.worker_faults import InjectedError
from phalanx.supervision import (
    CallTimeout,
    ChildRefused,
    ExecutorClosed,
    LockTimeout,
    MessageTooLarge,
    PhalanxError,
    RuntimeFault,
    StartFailed,
    SupervisorDown,
    WorkerDied,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from phalanx.actors import Executor, WorkerActor
    from phalanx.chaos.history.journal import Journal

    from .target import Traffic

_LARGE_BYTES = 256 << 10
_PIPELINED = 6  # calls
_MOST_FAILURES = 20
_BREATH = 0.02  # seconds between rounds: the history of minutes must fit into memory
_PAUSE = 0.05  # seconds until a caller looks again for a group that is being built
_TORCH_WORDS = ("gloo", "nccl", "NCCL", "Connection closed", "process group")
_OF_TREES = (SupervisorDown, ChildRefused)  # while a group is being built
_EXPECTED = (WorkerDied, CallTimeout, LockTimeout, StartFailed, RuntimeFault)
_EXPLAINED_BY = (
    (InjectedError, {"raise", "raise_before"}),
    (MessageTooLarge, {"memory"}),
    (MemoryError, {"memory"}),
)


class Mismatch(AssertionError):
    """A result was not the expected one."""


def echo(worker: WorkerActor, token: int, seconds: float, load: bytes) -> tuple[int, int, int]:
    """Sleep *seconds*; return the rank, *token* and the size of *load*."""
    time.sleep(seconds)
    return worker.ctx.rank, token, len(load)


def echoes(worker: WorkerActor, token: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield *count* items: the rank, *token* and the index."""
    for index in range(count):
        yield worker.ctx.rank, token, index


def make_calls(executor: Executor[Any], chance: random.Random, timeout: float) -> None:
    """Make one round of calls and check their results."""
    time.sleep(_BREATH)
    token = chance.getrandbits(60)
    load = bytes(_LARGE_BYTES) if chance.random() < 0.05 else b""
    args = (token, chance.choice((0.0, 0.001, 0.005)), load)
    every: list[tuple[int, int, int]]
    every = [(rank, token, len(load)) for rank in range(executor.world_size)]
    rank, retries = chance.randrange(executor.world_size), chance.choice((0, 1))
    limit: dict[str, Any] = {"timeout": timeout, "args": args, "on_timeout": "restart"}
    shape = chance.random()
    if shape < 0.04:
        executor.tell(echo, args=args, rank=chance.choice((None, rank)))
    elif shape < 0.1:
        taken = dict.fromkeys(range(executor.world_size), 0)
        for source, item in executor.stream(echoes, timeout, (token, _PIPELINED)):
            _check(item, (source, token, taken[source]))
            taken[source] += 1
        _check(taken, dict.fromkeys(taken, _PIPELINED))
    elif shape < 0.35:
        _check(executor.collective_rpc(echo, **limit, retries=3 * retries), every)
    elif shape < 0.5:
        _pipeline(executor, {**limit, "retries": retries}, every)
    elif shape < 0.65:
        outcomes = executor.gather(echo, timeout, args)
        for outcome in sorted(outcomes, key=lambda each: not each.ok):  # an error ends the round
            _check(outcome.get(), every[outcome.rank])
    elif shape < 0.85:
        _check(executor.call(echo, **limit, retries=retries, rank=rank), every[rank])
    else:
        future = executor.submit(echo, timeout, args, retries=retries)
        answer: tuple[int, int, int] = future.result()
        _check(answer, every[answer[0]])


def _pipeline(executor: Executor[Any], options: dict[str, Any], every: object) -> None:
    """Make calls one behind the other; raise the last error once all have ended."""
    calls = range(_PIPELINED)
    futures: list[Any]
    futures = [executor.collective_rpc(echo, **options, non_block=True) for _ in calls]
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
        raise Mismatch(f"the result was {found!r}, not {expected!r}")


class Callers:
    """Threads that call the traffic until they are stopped.

    Args:
        handle: Returns the first argument of the traffic; None while there is no group.
        chances: One for each thread.
        faults: The names of those in the schedule.
    """

    def __init__(
        self,
        handle: Callable[[], Any],
        traffic: Traffic,
        chances: list[random.Random],
        journal: Journal,
        faults: frozenset[str],
    ) -> None:
        self._handle, self._traffic = handle, traffic
        self._journal, self._faults = journal, faults
        self._stop = threading.Event()
        self._failures = 0
        self._threads = [
            threading.Thread(target=self._run, args=(chance,), name=f"caller-{i}", daemon=True)
            for i, chance in enumerate(chances)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Start no further round."""
        self._stop.set()

    def waiting(self) -> list[str]:
        """Return the names of the threads that still wait for a result."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _run(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            handle = self._handle()
            if handle is None:
                self._stop.wait(_PAUSE)
                continue
            try:
                self._traffic(handle, chance)
            except (ExecutorClosed, *_OF_TREES) as error:
                if not isinstance(error, ExecutorClosed) and not self._faults:
                    self._report(error)
                self._stop.wait(_PAUSE)
            except BaseException as error:  # noqa: BLE001  # reported, whatever it is
                if not self._is_explained(error):
                    self._report(error)

    def _report(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures <= _MOST_FAILURES:
            trace = "".join(traceback.format_exception(error))
            what = f"{type(error).__name__}: {error}"[:500]
            self._journal.write(WorkloadFailed(at=now(), error=what, trace=trace[-4000:]))

    def _is_explained(self, error: BaseException) -> bool:
        """Whether a call may end with *error*, given the faults of the run."""
        if isinstance(error, _EXPECTED):
            return True
        for kind, faults in _EXPLAINED_BY:
            if isinstance(error, kind):
                return not self._faults.isdisjoint(faults)
        if not self._faults or isinstance(error, PhalanxError):
            return False
        # Errors of ranks in a process group of which another rank has died.
        if type(error).__module__.partition(".")[0] == "torch":
            return True
        return isinstance(error, RuntimeError) and any(w in str(error) for w in _TORCH_WORDS)
