"""Runs and their folders: `run_chaos` makes one, and `load_run` reads one.

A folder holds ``run.json`` (target and plan), ``*.jsonl`` (events) and ``result.json``. `load_run`
needs nothing else; the file that `save_plan` writes is enough to repeat the run.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from contextlib import suppress
from dataclasses import fields as fields_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

from .checker.checker import check
from .config import Chaos
from .driver_process import DriverRuns
from .history.journal import read_history, recording
from .nemesis.schedule import Schedule
from .report.result import ChaosResult
from .session import Session
from .workload.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from .session import Progress

_RESULT, _PLAN = "result.json", "run.json"
_FORMAT = 3


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
        SpecError: an argument is invalid, or the target cannot have the faults: of that it has been
            built.
        Exception: what the factory raised, also when it built a target again; of that no
            `PhalanxError`: it is called once more.
        RuntimeFault: the record could not be written.
    """
    if plan is None:
        plan = Chaos(**fields)
    elif fields:
        raise TypeError(f"give either a plan or its fields ({', '.join(fields)}), not both")
    found = Target.of(target)
    plan.check_machine()
    stop = threading.Event() if interrupt is None else interrupt
    kept = plan.record is not None
    folder = plan.record or Path(tempfile.mkdtemp(prefix="chaos-run-"))
    try:
        with recording(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_plan(folder, found.name, plan)
        kind = DriverRuns if plan.hits_driver else Session
        kind(plan, found, folder, stop, on_progress).run()
        with recording(folder):
            history = read_history(folder, seed=plan.drawn_from)
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
            (folder / _RESULT).write_text(result.to_json())
        return result
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def save_plan(folder: Path, target: str, plan: Chaos) -> None:
    """Write the target's name and the plan."""
    given = {
        f.name: getattr(plan, f.name) for f in fields_of(plan) if f.init and f.name != "record"
    }
    given["schedule"] = json.loads(plan.planned.to_json())
    text = json.dumps({"format": _FORMAT, "target": target, "plan": given}, indent=1)
    (folder / _PLAN).write_text(text)


def load_plan(folder: Path) -> tuple[str, Chaos]:
    """Return the target's name and the plan of the run in *folder*.

    Raises:
        SpecError: there is no run in it.
    """
    try:
        loaded: dict[str, Any] = json.loads((folder / _PLAN).read_text())
        if loaded["format"] != _FORMAT:
            remedy = f"a record of format {loaded['format']}; this version reads {_FORMAT}"
            raise SpecError("run", str(folder), remedy)
        given: dict[str, Any] = loaded["plan"]
        schedule = Schedule.from_json(json.dumps(given.pop("schedule")))
        with suppress(SpecError):
            drawn = Chaos(**given)
            if drawn.planned == schedule:
                return loaded["target"], drawn
        return loaded["target"], Chaos(**given, schedule=schedule)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError("run", str(folder), f"no record of a run: {error}") from error


def load_run(folder: Path | str) -> ChaosResult:
    """Return the result of the run in *folder*.

    Raises:
        SpecError: there is no run in it.
    """
    where = Path(folder)
    target, plan = load_plan(where)
    try:
        history = read_history(where, seed=plan.drawn_from)
    except ValueError as error:
        raise SpecError("run", str(where), f"its history is broken: {error}") from error
    interrupted = False
    with suppress(OSError, ValueError, KeyError):
        interrupted = bool(json.loads((where / _RESULT).read_text())["interrupted"])
    return ChaosResult(target, plan, history, check(history), interrupted, where)
