"""What a user builds from pyzmq in an hour: ROUTER and DEALERs over ipc, with pickle.

No deadlines, no deaths, no order between threads: a bare exchange of messages.
"""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import tempfile
from importlib.metadata import version
from typing import Any

import zmq

from .protocol import Contestant, Echo

_LONG = 30_000  # milliseconds until a worker that does not answer is a mistake


def serve(address: str, name: bytes) -> None:
    """Answer calls until the message to stop."""
    echo = Echo()
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.IDENTITY, name)
        sock.connect(address)
        sock.send(b"")
        while (message := sock.recv()) != b"stop":
            method, args = pickle.loads(message)
            sock.send(pickle.dumps(getattr(echo, method)(*args), 5))


class RawZmq(Contestant):
    """One ROUTER here, one DEALER in each process."""

    def open(self, ranks: int, variant: str) -> None:
        del variant
        self._folder = tempfile.mkdtemp()
        address = f"ipc://{self._folder}/calls"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVTIMEO, _LONG)
        self._router.bind(address)
        self._names = [f"rank {rank}".encode() for rank in range(ranks)]
        spawn = multiprocessing.get_context("spawn")
        self._processes = [
            spawn.Process(target=serve, args=(address, name), daemon=True) for name in self._names
        ]
        for process in self._processes:
            process.start()
        for _ in self._names:
            self._router.recv_multipart()

    def close(self) -> None:
        for name in self._names:
            self._router.send_multipart((name, b"stop"))
        for process in self._processes:
            process.join()
        self._context.destroy()
        shutil.rmtree(self._folder)

    def version(self) -> str:
        return version("pyzmq")

    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def call(self, method: str, *args: Any) -> Any:
        message = pickle.dumps((method, args), 5)
        for name in self._names:
            self._router.send_multipart((name, message))
        answers: dict[bytes, Any] = {}
        for _ in self._names:
            name, answer = self._router.recv_multipart()
            answers[name] = pickle.loads(answer)
        return [answers[name] for name in self._names]

    def pipeline(self, times: int, window: int) -> None:
        sent = answered = 0
        while answered < times:
            while sent < times and sent - answered < window:
                message = pickle.dumps(("nothing", ()), 5)
                for name in self._names:
                    self._router.send_multipart((name, message))
                sent += 1
            # As many answers as a call has; they may be of different calls.
            for _ in self._names:
                pickle.loads(self._router.recv_multipart()[1])
            answered += 1


def make() -> RawZmq:
    """Return the contestant."""
    return RawZmq()
