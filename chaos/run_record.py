"""The folder of a run: what was asked for, what happened, what came of it.

Guarantees: what `save_plan` leaves is enough to run the same again; `load_run` needs nothing but
the folder.

In it: ``run.json`` (the target and the plan, with every strike), ``*.jsonl`` (the history, in one
file for each who wrote it), ``result.json`` (the figures).
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from phalanx.supervision import SpecError

from .checker import check
from .journal import read_history
from .plan import Chaos
from .result import ChaosResult
from .schedule import Schedule
from .target import Target

PLAN = "run.json"
RESULT = "result.json"
_FORMAT = 2


def save_plan(folder: Path, target: str, plan: Chaos, home: str | None = "") -> None:
    """Write down what is asked for, before it begins; *home* as in `Target`."""
    given = {f.name: getattr(plan, f.name) for f in fields(plan)}
    given["schedule"] = json.loads(plan.strikes.to_json())
    del given["record"]
    text = json.dumps({"format": _FORMAT, "target": target, "home": home, "plan": given}, indent=1)
    (folder / PLAN).write_text(text)


def load_plan(folder: Path) -> tuple[str, Chaos]:
    """Return the target and the plan of the run in *folder*.

    Raises:
        SpecError: there is no run in it.
    """
    try:
        loaded: dict[str, Any] = json.loads((folder / PLAN).read_text())
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


def load_target(folder: Path) -> Target:
    """Return the target of the run in *folder*.

    Raises:
        SpecError: it cannot be imported by the name in the record.
    """
    name, _ = load_plan(folder)
    home: str | None = json.loads((folder / PLAN).read_text()).get("home", "")
    if home is None:
        remedy = (
            "cannot be imported by a name: point runs at a function or class at the top level of "
            "a module, or call phalanx.chaos.shrink_run(folder, target=...)"
        )
        raise SpecError("target", name, remedy)
    return Target.of(name, home=home)


def load_run(folder: Path | str) -> ChaosResult:
    """Return the result of the run whose record lies in *folder*.

    Raises:
        SpecError: there is none in it.
    """
    where = Path(folder)
    target, plan = load_plan(where)
    try:
        history = read_history(where, seed=plan.seed, target=target)
    except ValueError as error:
        raise SpecError("run", str(where), f"its history is broken: {error}") from error
    return ChaosResult(target, plan, history, check(history), record=where)
