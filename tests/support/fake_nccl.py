"""A backend of torch.distributed that stands in for NCCL: gloo inside, and its own abort."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from tests.support.survivors import Keeper

from phalanx.actors import AsyncOutput, WorkerContext

NAME = "fakenccl"  # phalanx looks for the name


def _wait(is_over: Callable[[], bool], begins: Callable[[], object]) -> None:
    """Wait as native code does, which has no frame: the innermost is one of torch's.

    *begins* is called once that is so.
    """
    over, waiting = threading.Lock(), threading.get_ident()
    over.acquire()

    def look() -> None:
        while sys._current_frames()[waiting].f_code is not _wait.__code__:
            time.sleep(0.001)
        begins()
        while not is_over():
            time.sleep(0.001)
        over.release()

    threading.Thread(target=look, daemon=True).start()
    over.acquire()


_wait.__code__ = _wait.__code__.replace(co_filename="/torch/distributed/distributed_c10d.py")


def register() -> None:
    """Make the backend known to torch, in this process.

    As with NCCL, an abort returns once no operation is under way, also in other groups.

    FAKE_NCCL_ABORT says what its abort does: ``end`` (as NCCL: operations under way return, with
    undefined results), ``hang``, ``lie`` (returns, and ends nothing) or ``raise``. It is for one
    rank, FAKE_NCCL_RANK; the others' ends. Each abort is noted in the file FAKE_NCCL_LOG.
    """
    dist: Any = import_module("torch.distributed")
    if NAME in dist.Backend.backend_list:
        return

    under_way: list[Any] = []

    class FakeNccl(dist.ProcessGroup):  # type: ignore[misc]  # torch hides its type
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            super().__init__(rank, size)
            self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
            self.aborted = threading.Event()
            mine = os.environ.get("FAKE_NCCL_RANK") in (None, os.environ["RANK"])
            self.how = os.environ.get("FAKE_NCCL_ABORT", "end") if mine else "end"

        def getBackendName(self) -> str:  # the name is torch's
            return NAME

        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            """Wait as a stream would: without an error if it is aborted."""
            assert not self.aborted.is_set(), "NCCL communicator was aborted"
            under_way.append(self)
            try:
                work = self.inner.allreduce(tensors, opts)
                _wait(
                    lambda: self.aborted.is_set() or (work.is_completed() and work.is_success()),
                    NcclKeeper.tell,
                )
                if self.aborted.is_set():
                    tensors[0].fill_(float("nan"))
            finally:
                under_way.remove(self)
            torch: Any = import_module("torch")
            future = torch.futures.Future()
            future.set_result(tensors)
            return torch._C._distributed_c10d._create_work_from_future(future)

        def barrier(self, opts: Any = None) -> Any:
            return self.inner.barrier(opts)

        def abort(self) -> None:
            with open(os.environ["FAKE_NCCL_LOG"], "a") as log:
                log.write(f"{os.environ['RANK']} {self.how} {dist.is_initialized()}\n")
            match self.how:
                case "hang":
                    threading.Event().wait()
                case "raise":
                    raise RuntimeError("NCCL error: unhandled cuda error")
                case "lie":
                    return
                case _:
                    self.aborted.set()
                    while under_way:  # for ever, if need be: as NCCL's
                        time.sleep(0.001)

        def shutdown(self) -> None:
            pass

    dist.Backend.register_backend(
        NAME,
        FakeNccl,
        devices=["cpu", "cuda"],
    )


class Late:
    """A result that is computed when it is pickled."""

    def __init__(self, compute: Callable[[], float]) -> None:
        self._compute = compute

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (self._compute(),)


class NcclKeeper(Keeper):
    """Meets the others in a group of the stand-in, and in one split from it.

    Attributes:
        waits: Files to be made as soon as an operation is under way.
    """

    waits: ClassVar[list[Path]] = []

    @classmethod
    def tell(cls) -> None:
        """Make the files."""
        while cls.waits:
            cls.waits.pop().touch()

    def join(self, ctx: WorkerContext) -> None:
        register()
        dist: Any = import_module("torch.distributed")
        ctx.init_process_group(NAME, timeout=60)
        self.part = dist.new_group(list(range(ctx.world_size)))

    def reduce_in_part(self, mark: str) -> float:
        """Wait in the split group for a rank that does not come; return what that gave."""
        return self._reduce(mark, self.part)

    def reduce_in_world(self, mark: str) -> float:
        """Wait in the group of all."""
        return self._reduce(mark, None)

    def _reduce(self, mark: str, group: Any) -> float:
        dist: Any = import_module("torch.distributed")
        torch: Any = import_module("torch")
        path = Path(f"{mark}.{self.ctx.rank}")
        if self.ctx.rank == 1:
            path.touch()
            threading.Event().wait()
        self.waits.append(path)
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        return float(one)

    def reduce_in_reply(self, mark: str) -> Late:
        """Wait when the result is sent, as for what a GPU has still to compute."""
        return Late(lambda: self.reduce_in_part(mark))

    def reduce_in_output(self, mark: str) -> AsyncOutput:
        """Wait on the output thread, while this rank can be told to form the next group."""

        class Output(AsyncOutput):
            def get_output(_self) -> float:
                return self.reduce_in_part(mark)

        return Output()

    def reduce_in_stream(self, mark: str) -> Iterator[float]:
        """Yield what is right, then wait, then what is not."""
        yield 1.0
        yield self.reduce_in_part(mark)

    def answer_after_an_abort(self, mark: str) -> str:
        """Return, on rank 2, as soon as rank 0 is aborted, which sends others what it has."""
        Path(f"{mark}.{self.ctx.rank}").touch()
        if self.ctx.rank == 1:
            threading.Event().wait()
        log = Path(os.environ["FAKE_NCCL_LOG"])
        while self.ctx.rank == 2 and not (log.exists() and "0 end" in log.read_text()):
            time.sleep(0.001)
        return "nonsense" if self.ctx.rank == 2 else "right"

    def compute_after(self, mark: str, seconds: float) -> float:
        """Go on below a function of torch when the operation has been aborted."""
        torch: Any = import_module("torch")

        class Slow(torch.autograd.Function):  # type: ignore[misc]  # torch hides its type
            @staticmethod
            def forward(ctx: Any, value: Any) -> Any:
                return value * 1

            @staticmethod
            def backward(ctx: Any, gradient: Any) -> Any:
                self.reduce_in_part(mark)
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    time.sleep(0.01)
                return gradient

        value = torch.ones(1, requires_grad=True)
        torch.autograd.backward(Slow.apply(value).sum())
        return 1.0

    def variables(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]
