"""Children and listeners whose every move a test makes, and trees of them."""

from __future__ import annotations

import subprocess
import textwrap
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal

import pykka
from tests.support.programs import run_python

from phalanx.supervision import (
    KILLED,
    ChildSpec,
    ChildStarted,
    ExitKind,
    ExitReason,
    Intensity,
    Notice,
    SupervisorSpec,
)

LIMIT = 10.0
CRASH = ExitReason(ExitKind.CRASH)


class Notices:
    """What a tree said, to be waited for."""

    def __init__(self) -> None:
        self.seen: list[Notice] = []
        self._changed = threading.Condition()

    def __call__(self, notice: Notice) -> None:
        with self._changed:
            self.seen.append(notice)
            self._changed.notify_all()

    def wait(self, wanted: Callable[[Notice], bool], count: int = 1) -> Notice:
        with self._changed:
            assert self._changed.wait_for(lambda: self._found(wanted) >= count, LIMIT), self.seen
        return [notice for notice in self.seen if wanted(notice)][count - 1]

    def _found(self, wanted: Callable[[Notice], bool]) -> int:
        return sum(map(wanted, self.seen))

    def wait_started(self, path: str, incarnation: int) -> None:
        self.wait(
            lambda n: isinstance(n, ChildStarted) and (n.path, n.incarnation) == (path, incarnation)
        )


class Echo(pykka.ThreadingActor):
    """Answers what it is sent; raises what is an exception."""

    def on_receive(self, message: Any) -> Any:
        if isinstance(message, BaseException):
            raise message
        return message


class ScriptedChild:
    """A child whose every move the test makes."""

    def __init__(self) -> None:
        self.contexts: SimpleQueue[Any] = SimpleQueue()
        self.told: SimpleQueue[str] = SimpleQueue()
        self.answers = True  # ends when it is asked to

    def __call__(self, ctx: Any) -> Any:
        self.ctx = ctx
        self.contexts.put(ctx)
        return self

    def terminate(self, reason: ExitReason) -> None:
        self.told.put("terminate")
        if self.answers:
            self.ctx.exited(ExitReason(ExitKind.SHUTDOWN))

    def kill(self) -> None:
        self.told.put("kill")
        self.ctx.exited(KILLED)


def wait_stop(stop: threading.Event) -> None:
    stop.wait()


def tree(*children: ChildSpec | SupervisorSpec, **options: Any) -> SupervisorSpec:
    return SupervisorSpec("top", children=children, intensity=Intensity(5, 60.0), **options)


def in_sub_process(code: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", textwrap.dedent(code))  # fmt: skip


class Exits(pykka.ThreadingActor):
    """An actor of the program's own that ends by SystemExit."""

    use_daemon_thread = True

    def on_receive(self, message: Any) -> None:
        raise SystemExit(message)


def stop_every_actor(how: Literal["stop_all", "SystemExit"]) -> None:
    """Have Pykka stop every actor that it knows: asked to, or as it does when one exits."""
    if how == "stop_all":
        assert pykka.ActorRegistry.stop_all(block=True, timeout=LIMIT)
        return
    unrelated = Exits.start()
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("Exits"))
    unrelated.tell("exit")
    thread.join(LIMIT)
