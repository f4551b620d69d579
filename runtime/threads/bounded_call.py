"""Questions to something that may never answer, asked on a thread of their own.

Guarantees: whoever asks waits no longer than the limit. While one question is stuck no other is
asked: each is refused at once, until the stuck one comes back. The thread exists from the first
question to `close`, or until nobody holds the asker any more; it never keeps a program alive.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Answer = TypeVar("_Answer")


class Unanswered(Exception):
    """There was no answer in time."""


@dataclass(slots=True, eq=False)
class _Job:
    question: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: BaseException | None = None


class Asker:
    """Asks questions one after the other. Thread-safe.

    Args:
        name: Of its thread.
        limit: Seconds that a question may take.
    """

    def __init__(self, name: str, limit: float) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._last: _Job | None = None
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Return the answer, or raise what the question raised.

        Raises:
            Unanswered: it, or the one before it, took longer than the limit.
        """
        until = time.monotonic() + self._limit
        if not self._lock.acquire(timeout=self._limit):
            msg = f"others were asking for {self._limit:g} s"
            raise Unanswered(msg)
        try:
            stuck = self._last
            if stuck is not None and not stuck.done.is_set():
                msg = "the question before is still without an answer"
                raise Unanswered(msg)
            if self._jobs is None:
                self._start()
            assert self._jobs is not None
            job = self._last = _Job(question)
            self._jobs.put(job)
            if not job.done.wait(max(0.0, until - time.monotonic())):
                msg = f"no answer within {self._limit:g} s"
                raise Unanswered(msg)
            self._last = None
        finally:
            self._lock.release()
        try:
            if job.error is not None:
                raise job.error
            answer: _Answer = job.answer
            return answer
        finally:
            # The error's traceback holds this frame: with the way back to it, all our callers'
            # values would live on until the garbage collector comes by.
            del job

    def close(self) -> None:
        """End the thread, once it has come back; it can be asked again."""
        with self._lock:
            jobs, self._jobs = self._jobs, None
            thread, self._thread = self._thread, None
            stuck = self._last is not None and not self._last.done.is_set()
            self._last = None
        if jobs is not None:
            jobs.put(None)
        if thread is not None and not stuck:
            thread.join(self._limit)

    def _start(self) -> None:
        jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs = jobs
        self._thread = threading.Thread(target=_serve, args=(jobs,), name=self._name, daemon=True)
        self._thread.start()
        weakref.finalize(self, jobs.put, None).atexit = False


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.answer = job.question()
        except BaseException as error:  # noqa: BLE001  # raised where it was asked
            job.error = error
        job.done.set()
        del job  # else the last question lives as long as the thread
