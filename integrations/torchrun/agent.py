"""The launcher's side of a run: an executor of scripts, its signals, its end and exit code."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.actors import Executor, Launch, Limits, RestartPolicy, StopPolicy
from phalanx.runtime import (
    GroupEnded,
    GroupUp,
    Runtime,
    WorkerCrashed,
    WorkerExited,
    safe_text,
)
from phalanx.supervision import (
    BackOff,
    ExitKind,
    Intensity,
    Restart,
    StartFailed,
    Strategy,
    require_package,
)

from .environment import make_state_memory
from .logs import Tail, open_logs
from .summary import Failure, pass_on, root_cause, summary
from .worker import Job, ScriptWorker

if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, Self

    from .logs import LogPlan
    from .options import Options

_PRELOAD = ("torch", "torch._dynamo")  # but for commands, which import what they use themselves
_WORKER = "phalanx.integrations.torchrun.worker"
_FOREVER = 1e9  # seconds
_MOMENT = 0.05  # seconds before a restart; twice as long each time that a group goes on failing
_HEALTHY = 5.0  # seconds after which a round counts as one that worked


class _Signalled(BaseException):
    """A signal that ends the launcher came while the ranks were being started."""


class _Signals:
    """The launcher's signals, from `__enter__` to `__exit__`: put into a queue.

    Attributes:
        raises: Raise `_Signalled` as well.
    """

    def __init__(self, numbers: tuple[signal.Signals, ...], inbox: queue.SimpleQueue[Any]) -> None:
        self._numbers = numbers
        self._inbox = inbox
        self._before: dict[int, Any] = {}
        self.raises = False

    def __enter__(self) -> Self:
        for number in self._numbers:
            # The setting of nohup stays.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: it was set by C code
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._inbox.put(signal.Signals(number))
        if self.raises:
            self.raises = False
            raise _Signalled


def run(options: Options) -> int:
    """Run the program of *options* on all ranks; return the exit code: torchrun's, 0 or 1.

    Raises:
        MissingPackage: torch is not installed.
    """
    require_package("torch", "torch")
    for line in options.ignored:
        _say(line)
    if "OMP_NUM_THREADS" not in os.environ and options.world_size > 1:
        os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun; read when torch is imported
    handled = ",".join(each.name for each in options.signals)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = handled
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the folder of this command
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    logs = open_logs(options.logs, options.environment.run_id, options.world_size)
    role, console = options.environment.role, {"stdout": sys.stdout, "stderr": sys.stderr}
    with _Signals(options.signals, inbox) as signals, Tail(logs, role, console) as tail:  # type: ignore[arg-type]
        return _Run(options, logs, inbox, signals, tail).run()


class _Run:
    def __init__(
        self,
        options: Options,
        logs: LogPlan,
        inbox: queue.SimpleQueue[Any],
        signals: _Signals,
        tail: Tail,
    ) -> None:
        self._options = options
        self._logs = logs
        self._inbox = inbox
        self._signals = signals
        self._tail = tail
        self._path = tuple(sys.path)
        memory = make_state_memory(options.world_size)
        self._environment = replace(options.environment, state_memory=memory)
        self._restarts = 0  # before the first round that began
        self._exits: list[WorkerExited] = []  # of the last round
        self._passed_on: signal.Signals | None = None

    def run(self) -> int:
        name = Path(self._options.program.target).stem or "torchrun"
        with ExitStack() as made:
            try:
                self._signals.raises = True
                runtime = made.enter_context(Runtime(name=name, console=None))
                executor = self._start(name, runtime)
            except StartFailed as error:
                _say(f"the ranks could not be started: {error}")
                return 1
            except _Signalled:
                return 1
            finally:
                self._signals.raises = False
            made.callback(self._close, executor)
            return self._follow(executor)

    def _start(self, name: str, runtime: Runtime) -> Executor[ScriptWorker]:
        """Have all ranks there; one that dies before that costs a restart, as at any other time."""
        most, folder = self._options.environment.max_restarts, self._options.program.folder
        if self._options.preload and folder is not None:
            sys.path.append(folder)
        while True:
            try:
                return self._executor(name, runtime)
            except StartFailed as error:
                if error.__cause__ is not None or self._restarts == most:
                    raise
                self._restarts += 1
                _say(str(error))
                _say(f"restart {self._restarts} of {most}")

    def _executor(self, name: str, runtime: Runtime) -> Executor[ScriptWorker]:
        options = self._options
        job = Job(
            program=options.program,
            environment=self._environment,
            logs=self._logs,
            path=self._path,
            hang_after=options.hang_after,
            restarts=self._restarts,
        )
        # Left to itself torch takes the threads that it takes under torchrun.
        env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": ""}
        preload = () if options.program.kind == "command" else _PRELOAD
        delay = options.longest_delay
        backoff = BackOff(initial=min(_MOMENT, delay), maximum=delay, reset_after=_HEALTHY)
        return Executor(
            ScriptWorker,
            options.world_size,
            args=(job,),
            name=name,
            policy=RestartPolicy(
                strategy=Strategy.ONE_FOR_ALL,
                intensity=Intensity(options.environment.max_restarts - self._restarts, _FOREVER),
                restart=Restart.TRANSIENT,
                backoff=backoff if delay else None,
                report_dir=options.report_dir,
            ),
            devices="cpu",
            limits=Limits(
                hang=options.hang_after,
                # Ranks may work on for as long as they like after one has left by os._exit(0).
                stop=StopPolicy(ask=_FOREVER, hurry=options.shutdown_timeout),
            ),
            launch=Launch(preload=(_WORKER, *preload, *options.preload), stdio="inherit", env=env),
            runtime=runtime,
        )

    def _follow(self, executor: Executor[ScriptWorker]) -> int:
        """Run the program; return the exit code once all has ended."""
        executor.subscribe(self._on_event)
        call = executor.collective_rpc("run", retries=1 << 30, non_block=True)
        call.add_done_callback(self._inbox.put)
        while True:
            match self._inbox.get():
                case signal.Signals() as number:
                    self._pass_on(executor, number)
                case GroupEnded():
                    return self._end(executor)
                case done if done is call and call.exception() is None and not self._passed_on:
                    return 0
                case _:
                    pass  # the group has failed, and is about to end

    def _on_event(self, event: object) -> None:
        match event:
            case WorkerExited():
                self._exits = [each for each in self._exits if each.epoch == event.epoch]
                self._exits.append(event)
            case WorkerCrashed(report=report) if report.reason.is_failure and not self._passed_on:
                _say(f"rank {report.rank} (pid {report.pid}) died: {report.reason}")
                if report.reason.signal is not None:  # else the rank has shown its traceback
                    for line in (report.stacks or report.last_words).splitlines():
                        sys.stderr.write(f"{safe_text(line)}\n")
            case GroupUp(epoch=epoch) if epoch > 1:
                most, number = self._options.environment.max_restarts, epoch - 1 + self._restarts
                _say(f"restart {number} of {most}: all ranks run again after {event.took:.2f} s")
            case GroupEnded():
                self._inbox.put(event)
            case _:
                pass

    def _pass_on(self, executor: Executor[ScriptWorker], number: signal.Signals) -> None:
        """Pass a signal on to all ranks, whose end is that of the run; the second kills them."""
        if self._passed_on is not None:
            executor.kill()
            return
        self._passed_on = number
        pids = [rank.pid for rank in executor.ranks if rank.pid is not None]
        executor.request_close()
        for pid in pids:
            with suppress(ProcessLookupError):
                if self._options.program.kind == "command":
                    os.kill(pid, number)  # which passes it on to the group of the command
                else:
                    os.killpg(pid, number)
        timer = threading.Timer(self._options.shutdown_timeout, executor.kill)
        timer.daemon = True
        timer.start()

    def _end(self, executor: Executor[ScriptWorker]) -> int:
        """Tell why the group has ended; return the exit code."""
        if self._passed_on is not None:
            _say(f"ended by {self._passed_on.name}")
            return 1
        failures = (Failure.of(each, self._logs, self._restarts) for each in self._exits)
        found = [each for each in failures if each is not None]
        reason = executor.wait_closed(self._options.shutdown_timeout)
        if not found:
            if reason is not None and reason.kind is ExitKind.NORMAL:
                return 0  # every rank has left by os._exit(0)
            _say(f"the run has ended: {reason}")
            return 1
        self._tail.close()  # what the ranks have said comes before
        ordered = [found[0], *sorted(found[1:], key=lambda each: each.rank)]
        first = root_cause(ordered)
        sys.stderr.write(f"{summary(self._options.program.name, ordered, first)}\n")
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            pass_on(first, error_file)
        return 1

    def _close(self, executor: Executor[ScriptWorker]) -> None:
        """End the ranks, which have ended their program; by force if they do not end."""
        executor.request_close()
        deadline = time.monotonic() + self._options.shutdown_timeout
        while executor.exit_reason is None and executor.wait_closed(0.5) is None:
            if time.monotonic() > deadline:
                executor.kill()
                executor.wait_closed(10.0)
                return


def _say(text: str) -> None:
    sys.stderr.write(f"phalanx torchrun: {safe_text(text)}\n")
    sys.stderr.flush()
