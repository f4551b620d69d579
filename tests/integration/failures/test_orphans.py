"""What workers leave behind without a name, a mark or a parent that tells whose it was."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.support.shared_memory import FOREIGN, WRITTEN
from tests.support.transport import TRANSPORT

from phalanx.actors import Executor, Launch, WorkerActor, WorkerContext
from phalanx.chaos import ChaosResult, Schedule, ScheduledFault, run_chaos
from phalanx.chaos.history.events import LeakFound
from phalanx.chaos.instrumentation import leaks
from phalanx.runtime import Runtime

pytestmark = pytest.mark.timeout(120)

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]


class Careless(WorkerActor):
    """Leaves one thing of each kind."""

    def on_start(self, ctx: WorkerContext) -> None:
        self.heap: list[Any] = []
        if ctx.incarnation == 1:
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.Popen(SLEEP, env={}, start_new_session=True, **quiet)

    def work(self) -> None:
        if not self.heap:
            self.written = WRITTEN.open("wb")
            os.close(tempfile.mkstemp()[0])
            Path(tempfile.mkdtemp()).rmdir()
        self.heap.append(Path("/dev/null").open())  # noqa: SIM115  # that is the mistake


def careless(runtime: Runtime) -> tuple[Executor[Any], Any]:
    return Executor(
        Careless, 1, launch=Launch(preload=(), transport=TRANSPORT), runtime=runtime
    ), working


def working(executor: Executor[Any], _chance: random.Random) -> None:
    foreign = Path(tempfile.gettempdir()) / FOREIGN.name
    if not FOREIGN.exists():
        subprocess.run(["/usr/bin/touch", foreign, FOREIGN], check=True)
    executor.collective_rpc("work", 30.0)


def clear(result: ChaosResult) -> None:
    for left in result.history.every(LeakFound):
        if left.what == "process":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(left.name.split()[0]), signal.SIGKILL)
        elif left.name.startswith("/"):
            Path(left.name).unlink()


def test_what_a_worker_leaves_is_found_though_nothing_says_whose_it_is(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "_SETTLE_TIMEOUT", 0.5)
    schedule = Schedule((ScheduledFault(number=1, at=1.0, fault="kill", target="0"),))

    result = run_chaos(
        lambda: careless(runtime), duration=2.5, schedule=schedule, record=tmp_path / "run"
    )
    clear(result)
    FOREIGN.unlink()
    (Path(tempfile.gettempdir()) / FOREIGN.name).unlink()

    left = [(each.what, Path(each.name).name) for each in result.history.every(LeakFound)]
    assert [name for what, name in left if what == "shared memory"] == [WRITTEN.name]
    files = [name for what, name in left if what == "file"]
    assert len(files) == 2  # one of each incarnation
    assert all(re.match("tmp-[0-9]+-", name) for name in files)
    assert [what for what, name in left if "sleep(3600)" in name] == ["process"]
    assert len(left) == 4
    heaps = [each for each in result.violations if "descriptors more in rank 0" in each.message]
    assert {each.invariant for each in heaps} == {"nothing_left"}
    assert heaps
