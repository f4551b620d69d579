"""`run_chaos`: one run, from the plan to the result.

Guarantees: nothing has been started when a mistake in what was asked for is raised; whatever
happens in the run, what was built is closed and a result comes of it; the record of a run that
broke something is kept.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checker import check
from .journal import read_history, recording
from .lives import run_lives
from .plan import Chaos
from .result import ChaosResult
from .run_record import RESULT, save_plan
from .session import Session
from .target import Target

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
    """Build *target*, call it, do faults to it, and return what came of it.

    Args:
        target: A factory: a function without arguments that returns an `Executor`, or a tuple of
            one and its traffic (``traffic(executor, chance)``, called again and again by several
            threads); a `WorkerActor` class; or the name of either, as ``module:name``.
        plan: What is to be done; None takes it from *fields*, which are those of `Chaos`.
        on_progress: Told a few times a second how far it is; on the caller's thread.
        interrupt: When it is set the run ends early and in good order.
        fields: As `Chaos` has them: ``duration``, ``rate``, ``faults``, ``seed``, ...

    Raises:
        SpecError: something that was asked for makes no sense; nothing was started.
        Exception: what the factory itself raised when it was first called.
        RuntimeFault: the record could not be written.
    """
    if plan is None:
        plan = Chaos(**fields)
    elif fields:
        msg = f"give either a plan or its fields ({', '.join(fields)}), not both"
        raise TypeError(msg)
    found = Target.of(target)
    folder = _folder(plan)
    stop = threading.Event() if interrupt is None else interrupt
    kept = plan.record is not None
    try:
        with recording(folder):
            save_plan(folder, found.name, plan, found.home)
        if plan.hits_driver:
            run_lives(plan, found, folder, on_progress, stop)
        else:
            Session(plan, found, folder, on_progress, interrupt=stop).run()
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


def _folder(plan: Chaos) -> Path:
    if plan.record is None:
        return Path(tempfile.mkdtemp(prefix="chaos-run-"))
    plan.record.mkdir(mode=0o700, parents=True, exist_ok=True)
    return plan.record
