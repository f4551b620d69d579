"""`run_chaos`: one run, from the plan to the result."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checker.checker import check
from .config import Chaos
from .driver_process import run_drivers
from .history.journal import read_history, recording
from .report.result import ChaosResult
from .session import Session
from .store import RESULT, save_plan
from .workload.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from .session import Progress


def run_chaos(
    target: Target | str | Callable[[], Any],
    plan: Chaos | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    interrupt: threading.Event | None = None,
    **fields: Any,
) -> ChaosResult:
    """Build *target*, call it, inject faults into it, and return what came of it.

    Args:
        target: A factory: a function without arguments that returns an `Executor`, or a tuple of
            one and its traffic (``traffic(executor, chance)``, called repeatedly by several
            threads); a `WorkerActor` class; or the name of either, as ``module:name``.
        plan: The faults; None takes it from *fields*.
        on_progress: Called a few times a second, in the caller's thread.
        interrupt: Ends the run early and in good order when it is set.
        fields: Those of `Chaos`: ``duration``, ``rate``, ``faults``, ``seed``, ...

    Raises:
        SpecError: an argument makes no sense; nothing was started.
        Exception: what the factory raised when it was first called.
        RuntimeFault: the record could not be written.
    """
    if plan is None:
        plan = Chaos(**fields)
    elif fields:
        msg = f"give either a plan or its fields ({', '.join(fields)}), not both"
        raise TypeError(msg)
    found = Target.of(target)
    stop = threading.Event() if interrupt is None else interrupt
    kept = plan.record is not None
    folder = plan.record or Path(tempfile.mkdtemp(prefix="chaos-run-"))
    try:
        with recording(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_plan(folder, found.name, plan)
        if plan.hits_driver:
            run_drivers(plan, found, folder, on_progress, stop)
        else:
            Session(plan, found, folder, stop, on_progress).run()
        with recording(folder):
            history = read_history(folder, seed=plan.seed, target=found.name)
        violations = check(history)
        kept = kept or bool(violations)
        result = ChaosResult(
            found.name,
            plan,
            history,
            violations,
            interrupted=stop.is_set(),
            record=folder if kept else None,
        )
        with recording(folder):
            (folder / RESULT).write_text(result.to_json())
        return result
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
