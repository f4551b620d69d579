"""The folder of a run: ``run.json`` (target and plan), ``*.jsonl`` (events), ``result.json``.

`load_run` needs nothing but the folder; what `save_plan` writes is enough to run the same again.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from phalanx.supervision import SpecError

from .checker.checker import check
from .config import Chaos
from .history.journal import read_history
from .nemesis.schedule import Schedule
from .report.result import ChaosResult

RESULT = "result.json"
_PLAN = "run.json"
_FORMAT = 3


def save_plan(folder: Path, target: str, plan: Chaos) -> None:
    """Write the target's name and the plan."""
    given = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "record"}
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
        given["schedule"] = Schedule.from_json(json.dumps(given["schedule"]))
        return loaded["target"], Chaos(**given)
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
        history = read_history(where, seed=plan.seed, target=target)
    except ValueError as error:
        raise SpecError("run", str(where), f"its history is broken: {error}") from error
    return ChaosResult(target, plan, history, check(history), record=where)
