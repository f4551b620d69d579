"""Worker classes that the executor's tests share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from phalanx.actors import AsyncOutput, WorkerActor, WorkerContext, method
from phalanx.supervision import ExitReason


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unloadable:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


class NeedsTwo(Exception):
    """Gives its base one argument and takes two."""

    def __init__(self, one: str, two: object) -> None:
        super().__init__(one)
        self.two = two


class Late(AsyncOutput):
    def __init__(self, value: Any, gate: str | None = None) -> None:
        self._value = value
        self._gate = gate

    def get_output(self) -> Any:
        if self._gate is not None:
            wait_for(self._gate)
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def wait_for(path: str, seconds: float = 30.0) -> None:
    """Wait in a worker until *path* exists: the test opens the gate."""
    deadline = time.monotonic() + seconds
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.002)


def go_wrong(how: str, text: str) -> None:
    """Go wrong in one of the ways there are for a hook of a worker."""
    match how:
        case "raise":
            raise ValueError(text)
        case "unpicklable":
            raise Unpicklable(text)
        case "interrupt":
            raise KeyboardInterrupt
        case "exit":
            sys.exit(3)
        case "exit at once":
            os._exit(3)
        case "kill" | "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(600)
        case _:
            raise AssertionError(how)


class Echo(WorkerActor):
    """Does as it is told."""

    def __init__(self, greeting: str = "hello", **extra: Any) -> None:
        self.greeting = greeting
        self.extra = extra
        self.count = 0

    def note(self, path: str, text: str) -> None:
        """Append one line, in one write: an effect that outlives the worker."""
        with open(path, "a") as file:
            file.write(f"{text} rank={self.ctx.rank} inc={self.ctx.incarnation}\n")

    def echo(self, value: Any = None) -> Any:
        return value

    def rank(self) -> int:
        return self.ctx.rank

    def who(self) -> dict[str, Any]:
        return {
            "rank": self.ctx.rank,
            "world_size": self.ctx.world_size,
            "pid": os.getpid(),
            "incarnation": self.ctx.incarnation,
            "epoch": self.ctx.epoch,
            "coordinates": dict(self.ctx.coordinates),
            "device": self.ctx.device,
            "extra": self.extra,
            "greeting": self.greeting,
        }

    def env(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    @method()
    def add(self, amount: int = 1) -> int:
        self.count += amount
        return self.count

    @method(idempotent=True)
    def again(self, value: Any) -> Any:
        return value

    @method(reply="output")
    def forward(self, x: int) -> tuple[int, int]:
        return self.ctx.rank, x

    @method(reply="every")
    def everyone(self) -> int:
        return self.ctx.rank

    @method(reply="driver")
    def drivers(self) -> int:
        return self.ctx.rank

    def fail(self, rank: int | None = None, text: str = "boom") -> int:
        if rank is None or rank == self.ctx.rank:
            raise ValueError(text)
        return self.ctx.rank

    def fail_unpicklable(self) -> None:
        raise Unpicklable("cannot travel")

    def fail_unbuildable(self) -> None:
        raise NeedsTwo("one", Unloadable())

    def fail_with_two(self) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise NeedsTwo("one", "two") from error

    def reply_unpicklable(self) -> Any:
        return threading.Lock()

    def gated(self, gate: str, value: Any = None) -> Any:
        wait_for(gate)
        return value

    def gated_note(self, gate: str, path: str, text: str) -> str:
        self.note(path, text)
        wait_for(gate)
        return text

    def late(self, value: Any, gate: str | None = None) -> Late:
        return Late(value, gate)

    def kill_self(self, rank: int, number: int = signal.SIGKILL, inc: int = 1) -> int:
        if self.ctx.rank == rank and self.ctx.incarnation == inc:
            os.kill(os.getpid(), number)
            time.sleep(30)
        return self.ctx.incarnation

    def exit_by(self, how: str, code: int = 0) -> None:
        if how == "sys":
            sys.exit(code)
        os._exit(code)

    def close_fds(self) -> None:
        os.closerange(3, 4096)

    def emit(self, value: Any) -> None:
        self.ctx.emit(value)

    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=sys.stderr, flush=True)
        self.ctx.log.info("said", text=text)

    def grandchild(self, *, daemon: bool = False) -> int:
        code = "import time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=daemon)
        return child.pid

    def spin(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass


class StartFails(Echo):
    """Fails its start in a way of the test's choosing, on one rank."""

    def __init__(self, how: str, rank: int = 0, from_incarnation: int = 1) -> None:
        super().__init__()
        self.how = how
        self.bad = rank
        self.since = from_incarnation

    def on_start(self, ctx: WorkerContext) -> None:
        if ctx.rank != self.bad or ctx.incarnation < self.since:
            return
        if self.how == "exit":
            os._exit(0)
        if self.how == "sysexit":
            sys.exit(7)
        if self.how == "linger":
            threading.Thread(target=time.sleep, args=(600,)).start()
        go_wrong("raise" if self.how == "linger" else self.how, "bad weights")


class StartsLate(Echo):
    """Is not started before *gate* is there."""

    from_incarnation = 1

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def on_start(self, ctx: WorkerContext) -> None:
        if ctx.incarnation >= self.from_incarnation:
            self.gated(self.gate)


class LateAgain(StartsLate):
    """Is not started again before *gate* is there."""

    from_incarnation = 2


class NotesStarts(Echo):
    """Leaves a file in *folder* for each of its starts."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_start(self, ctx: WorkerContext) -> None:
        Path(self.folder, f"{ctx.rank}#{ctx.incarnation}").touch()


class Tidy(Echo):
    """Leaves a mark when it stops."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_stop(self, reason: ExitReason) -> None:
        self.note(self.path, f"stopped {reason.kind}")


class Stubborn(Echo):
    """Does not stop when asked, nor by SIGTERM."""

    def on_start(self, ctx: WorkerContext) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def hold(self, gate: str) -> None:
        Path(gate).touch()
        while True:
            time.sleep(60)


class Reducer(WorkerActor):
    """Meets the others in a process group."""

    def on_start(self, ctx: WorkerContext) -> None:
        ctx.init_process_group("gloo", timeout=60)

    def total(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value * (self.ctx.rank + 1)])
        dist.all_reduce(tensor)
        return float(tensor)

    def who(self) -> tuple[int, int, int]:
        return self.ctx.rank, self.ctx.epoch, os.getpid()
