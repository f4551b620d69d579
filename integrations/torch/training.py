"""Training: the driver's side of a run; holds the buffers and the executor, and counts steps."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from phalanx.actors import Emitted, Executor, Launch, RestartPolicy, group_of
from phalanx.runtime import usable_processors
from phalanx.supervision import (
    ExecutorClosed,
    ExitKind,
    Intensity,
    SpecError,
    StartFailed,
    Strategy,
    WorkerDied,
    check_choice,
    check_count,
    check_kind,
    check_limit,
)

from .buffers import Store
from .errors import NoRoom, TrainingError
from .trainer import Plan, Resumed, Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_T = TypeVar("_T", bound=Trainer)
_AGAIN = 3  # times that all ranks are started again, until a run is there
_RETRIES = 1 << 30  # the restart intensity says when it is enough
_PRELOAD = ("torch", "torch._dynamo", "phalanx.integrations.torch")
_COPIES = "glibc.cpu.x86_non_temporal_threshold=0x40000"


@dataclass(frozen=True, slots=True)
class Step:
    """A step that every rank has done.

    Attributes:
        result: Rank 0's value of `Trainer.train_step`.
    """

    number: int
    result: Any


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the ranks are given at their start, in a driver with *environ*.

    Sets have one order in every process that the run will ever have. Large copies pass the caches
    by: a state that was copied into the buffers is not read again.
    """
    tunables = [_COPIES, environ.get("GLIBC_TUNABLES", "")]  # an empty one would void all
    return {"PYTHONHASHSEED": "0", "GLIBC_TUNABLES": ":".join(filter(None, tunables))}


class Training(Generic[_T]):
    """A run of *trainer* on *ranks* processes, whose result does not depend on which of them die.

    Args:
        trainer: The worker class.
        ranks: How many; the same in all parts of a run.
        args: Positional arguments of its constructor, after the `Plan`.
        kwargs: Keyword arguments of it.
        seed: Of samples and random numbers.
        every: Steps from one state in the buffers to the next; the steps since then are done again
            where no survivor has a whole state. None takes 1, or 10 where the state is replicated
            and survivors are kept: then the buffers are needed only if no rank has the state.
        folder: Where the buffers are, for a run that outlives its driver: a new `Training` with the
            same folder goes on. None keeps them in memory.
        sharded: Whether the state of each rank is its own (FSDP2, tensor parallel), or equal on all
            ranks (DDP).
        survivors: As in `RestartPolicy`; ``"keep"`` re-forms the ranks that live. None takes what
            *policy* says, or ``"keep"``.
        threads: Of torch on each rank; None takes an equal share of the processors, or what the
            run in *folder* had.
        timeout: Seconds for joining a process group and for each collective operation; None takes
            torch's. With NCCL and survivors kept it limits the joining alone: give ``hang_after``.
        policy: None takes 100 restarts in 60 seconds.
        executor: Further arguments of `Executor`, but for ``cluster``. By default *launch* imports
            torch once for all ranks. Their ``PYTHONHASHSEED`` is 0, and ``GLIBC_TUNABLES`` has
            large copies pass the caches by, unless the environment of *launch* has others.

    Attributes:
        executor: The `Executor`; its calls may be used beside the run's. See `call`.
        resumed: The state from which the ranks continued, after each death.
        step: The last step that was done.

    Raises:
        WorldSizeChanged, SpecError, NoRoom, StateLost: nothing was started; see
            `docs/tutorials/training.md`.
        StartFailed: a rank could not be built; its ``__cause__`` is what it raised. One that is
            killed before all are there is started again, with the others, three times at most.
    """

    def __init__(
        self,
        trainer: type[_T],
        ranks: int,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        every: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        sharded: bool = False,
        survivors: Literal["keep", "restart"] | None = None,
        threads: int | None = None,
        timeout: float | None = None,
        policy: RestartPolicy | None = None,
        **executor: Any,
    ) -> None:
        check_count("ranks", ranks)
        check_kind("args", args, list | tuple)
        check_kind("kwargs", kwargs, Mapping | None)
        check_kind("seed", seed, int)
        check_kind("sharded", sharded, bool)
        check_kind("policy", policy, RestartPolicy | None)
        given: Any = trainer
        if not (isinstance(given, type) and issubclass(given, Trainer)):
            raise SpecError("trainer", trainer, "give a subclass of Trainer")
        if threads is None:
            threads = max(1, int(usable_processors()) // ranks)
        check_count("threads", threads)
        check_limit("timeout", timeout)
        if survivors is not None:
            check_choice("survivors", survivors, ("keep", "restart"))
        if policy is None:
            policy = RestartPolicy(survivors=survivors or "keep", intensity=Intensity(100, 60.0))
        elif survivors not in (None, policy.survivors):
            raise SpecError("survivors", survivors, f"policy has survivors={policy.survivors!r}")
        if policy.strategy is not Strategy.ONE_FOR_ALL:
            text = "the ranks form one process group: give ONE_FOR_ALL"
            raise SpecError("policy.strategy", policy.strategy, text)
        if executor.get("cluster") is not None:
            text = "the ranks and their buffers are on this machine: leave it out"
            raise SpecError("cluster", executor["cluster"], text)
        if every is None:
            every = 10 if policy.survivors == "keep" and not sharded and ranks > 1 else 1
        check_count("every", every)
        run = {"world_size": ranks, "seed": seed, "sharded": int(sharded), "threads": threads}
        self.resumed: list[Resumed] = []
        self._error: TrainingError | None = None
        self._is_apart = False
        self._trainer = trainer
        self._store = Store(folder, run)
        plan = Plan(
            paths=self._store.paths,
            seed=seed,
            every=every,
            sharded=sharded,
            threads=self._store.run["threads"],
            timeout=timeout,
        )
        try:
            launch = executor.pop("launch", None) or Launch(preload=_PRELOAD)
            launch = group_of("launch", Launch, launch, short="method")
            launch = replace(launch, env={**rank_environment(os.environ), **launch.env})
            given = {"kwargs": kwargs, "policy": policy, "launch": launch, **executor}
            self.executor = self._start(ranks, (plan, *args), given)
            self.executor.subscribe(self._note)
            self.step: int = self._call("position")
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int, args: tuple[Any, ...], given: dict[str, Any]) -> Executor[_T]:
        """Have all ranks there; one that is killed before that has all of them started again."""
        left = _AGAIN
        while True:
            try:
                return Executor(self._trainer, ranks, args=args, **given)
            except StartFailed as error:
                kinds = {report.reason.kind for report in error.reports}
                if kinds != {ExitKind.KILLED} or error.__cause__ is not None or not left:
                    raise
                left -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self, last: int) -> Iterator[Step]:
        """Do the steps up to *last*, and yield each once all ranks have done it.

        A death is not seen here, but for the time that it takes. After an exception the run is as
        before that step, which the next iterator begins with.

        Raises:
            WorkerDied: more ranks died than the restart policy allows.
            TrainingError: the ranks cannot go on from any state that there is; the run has ended.
            Exception: what `Trainer.train_step` raised.
        """
        check_kind("last", last, int)
        while self.step < last:
            result = self._call("advance", self.step + 1)
            self.step += 1
            yield Step(self.step, result)

    def call(self, method: str, *args: Any) -> Any:
        """Return rank 0's value of *method* of the trainer, which all ranks run after step `step`.

        It may run again after a death, and leaves the state as it is; modes of modules are set
        back. A call of `executor` can find ranks that have gone back to the buffers, and have yet
        to do steps again.

        Raises:
            SpecError: there is no such method.
            TrainingError: it has changed the state; the next step goes on from the one before.
            Exception: what it raised.
        """
        if not callable(getattr(self._trainer, method, None)):
            raise SpecError("method", method, f"{self._trainer.__name__} has no such method")
        return self._call("call_at", self.step, method, args)

    def digest(self) -> str:
        """Return the SHA-256 over the states of all ranks after step `step`, in hex."""
        found = self._call("call_at", self.step, "digest", (), reply_rank=None)
        return hashlib.sha256("".join(found).encode()).hexdigest()

    def close(self) -> None:
        """End the ranks and release the buffers; those in a folder stay for another run."""
        if hasattr(self, "executor"):
            self.executor.close()
        self._store.close()

    def _call(self, method: str, *args: Any, reply_rank: int | None = 0) -> Any:
        try:
            if self._is_apart:
                self.executor.restart(0)  # and the others are formed anew with it
                self._is_apart = False
            return self.executor.collective_rpc(
                method, args=args, unique_reply_rank=reply_rank, retries=_RETRIES
            )
        except (WorkerDied, ExecutorClosed) as end:
            if self._error is None:
                raise
            raise self._error from end
        except NoRoom:  # every rank has done the step
            raise
        except Exception:  # one rank may have done the step, and another not
            self._is_apart = True
            raise

    def _note(self, event: object) -> None:
        match event:
            case Emitted(value=Resumed() as resumed):
                self.resumed.append(resumed)
            case Emitted(value=TrainingError() as error):
                self._error = error
                self.executor.kill()
            case _:
                pass
