"""Starting processes in tests: a pipe they speak through, and waiting with a deadline."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from phalanx.runtime.linux import procfs
from phalanx.runtime.process.child_main import LaunchSpec
from phalanx.runtime.process.child_process import Process
from phalanx.runtime.process.launcher import Launcher

LONG = 60.0  # seconds; no test takes them unless something is broken


def soon() -> float:
    return time.monotonic() + LONG


class Lines:
    """The lines that come out of a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def next(self, deadline: float, said: Callable[[], object] = str) -> bytes:
        """Return the next line; where none comes, *said* tells what has been."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._fd, 1 << 16) if ready else b""
            assert data, f"it {'ended' if ready else 'says nothing'}; said: {said()}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Line:
    """A pipe from one process to the test."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self._lines = Lines(self.read)

    def receive(self) -> dict[str, Any]:
        """Return the next thing said."""
        said: dict[str, Any] = json.loads(self._lines.next(soon()))
        return said

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


class Starter:
    """Starts the functions of `entry_points` and records when they have ended."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.line = Line()
        self.exits: list[Process] = []
        self._news = threading.Condition()

    def spec(
        self,
        entry: str,
        payload: object = "",
        *,
        method: Literal["zygote", "exec"] = "zygote",
        **more: Any,
    ) -> LaunchSpec:
        more.setdefault("label", entry)
        more.setdefault("fds", {"out": self.line.write})
        return LaunchSpec(
            entry=f"tests.support.entry_points:{entry}",
            payload=str(payload).encode(),
            method=method,
            **more,
        )

    def start(
        self, entry: str, payload: object = "", *, deadline: float | None = None, **more: Any
    ) -> Process:
        spec = self.spec(entry, payload, **more)
        deadline = soon() if deadline is None else deadline
        return self.launcher.launch(spec, on_exit=self.on_exit, deadline=deadline)[0]

    def on_exit(self, process: Process) -> None:
        with self._news:
            self.exits.append(process)
            self._news.notify_all()

    def await_exits(self, count: int) -> list[Process]:
        with self._news:
            assert self._news.wait_for(lambda: len(self.exits) >= count, LONG)
            return list(self.exits)


def wait_until(holds: Callable[[], object], what: str = "the condition") -> None:
    """Wait for what is announced by no event."""
    deadline = soon()
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.005)


def start_thread(act: Callable[..., object], *args: Any, **options: Any) -> threading.Thread:
    thread = threading.Thread(target=act, args=args, kwargs=options)
    thread.start()
    return thread


def run_threads(count: int, act: Callable[[int], object]) -> None:
    """Run *act* in so many threads at once, each with its number, to their end."""
    threads = [start_thread(act, number) for number in range(count)]
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)


def is_alive(pid: int) -> bool:
    task = procfs.read(pid)
    return task is not None and task.state not in "ZX"
