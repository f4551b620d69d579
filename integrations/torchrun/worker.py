"""The worker class of ``phalanx torchrun``: one call runs the program, from start to end."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.actors import WorkerActor
from phalanx.runtime import abort_process_groups
from phalanx.supervision import RuntimeFault

from .activity import Activity
from .interpreter import run_command, run_python
from .logs import STREAMS, LogPlan

if TYPE_CHECKING:
    from .environment import RunEnvironment
    from .program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of every rank; pickled by name.

    Attributes:
        path: ``sys.path`` without the program's own folder.
        hang_after: As in `Options`.
        restarts: Those that were spent before the first round that began.
    """

    program: Program
    environment: RunEnvironment
    logs: LogPlan
    path: tuple[str, ...]
    hang_after: float | None
    restarts: int


class ScriptWorker(WorkerActor):
    """One rank."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def run(self) -> None:
        """Run the program; returns where it succeeds, and is the end of the process otherwise."""
        try:
            self._run()
        except Exception:  # noqa: BLE001  # no log file can be made, say, or the program not executed
            traceback.print_exc()
            os._exit(1)

    def _run(self) -> None:
        job, rank = self._job, self.ctx.rank
        restart = self.ctx.epoch - 1 + job.restarts
        error_file = job.logs.error_file(rank, restart)
        self._redirect(rank, restart, error_file)
        no_files = job.logs.spec.folder == Path(os.devnull)
        self._set_environment(rank, restart, "" if no_files else error_file)
        sys.path[:] = job.path
        if job.hang_after is not None:
            Activity(job.hang_after, self.ctx.report_progress)
        program = job.program
        arguments = program.args_of(rank)
        if program.kind == "command":
            run_command(program.target, [program.target, *arguments])
        else:
            run_python(program, arguments, lambda error: record(error, error_file))
        if self.ctx.is_stopping:
            os._exit(0)  # its handler of SIGTERM has ended it, and the next round waits for that
        if "torch.distributed" in sys.modules:
            try:
                abort_process_groups()  # the end of the process would do that to ranks that go on
            except RuntimeFault:
                os._exit(0)

    def _redirect(self, rank: int, restart: int, error_file: str) -> None:
        logs = self._job.logs
        if logs.folder is not None:
            Path(error_file).parent.mkdir(parents=True, exist_ok=True)
        else:
            Path(error_file).write_bytes(b"")  # that of the round before
        for stream, bit in STREAMS:
            if (target := logs.target(rank, restart, stream, bit)) is not None:
                file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
                os.dup2(file, bit)
                os.close(file)

    def _set_environment(self, rank: int, restart: int, error_file: str) -> None:
        rendezvous = self.ctx.rendezvous
        assert rendezvous is not None
        variables = self._job.environment.of_rank(
            rank, restart, error_file, rendezvous.address, rendezvous.port
        )
        for name, value in variables.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


def record(error: BaseException, error_file: str) -> None:
    """Write *error* in the form of torch's ``@record``, unless the program has done so itself."""
    path = Path(error_file)
    if not isinstance(error, Exception) or (path.exists() and path.stat().st_size):
        return
    lines = "".join(traceback.format_exception(error))
    extra = {"py_callstack": lines, "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    path.write_text(json.dumps({"message": message}))
