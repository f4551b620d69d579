"""``phalanx chaos shrink RUN``: a smaller schedule that breaks what a run broke.

Guarantees: the exit code is 0 if a schedule was found that fails, 1 if none fails any more, 2 where
what was asked for makes no sense, 130 after Ctrl-C; what was found by then is kept and printed.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.chaos import render_page, shrink_run
from phalanx.supervision import SpecError

from .chaos import check_report, ctrl_c, output_to
from .output import ESCAPED

if TYPE_CHECKING:
    import argparse

    from phalanx.chaos import ChaosResult, Shrunk


def run(arguments: argparse.Namespace) -> int:
    """Run it; return the exit code."""
    if arguments.run is None:
        raise SpecError("run", None, "name the folder of a run: phalanx chaos shrink RUN")
    check_report(arguments.report)
    limits = {"runs": arguments.runs, "repeat": arguments.repeat, "seconds": arguments.limit}
    given = {name: value for name, value in limits.items() if value is not None}
    stop = threading.Event()
    with (
        os.fdopen(os.dup(2), "w", errors=ESCAPED) as shown,
        tempfile.TemporaryDirectory(prefix="chaos-output-") as folder,
        ctrl_c(stop),
        output_to(Path(folder) / "output.log"),
    ):

        def tell(made: int, left: int) -> None:
            shown.write(f"run {made + 1}: {left} faults left\n")
            shown.flush()

        shrunk = shrink_run(
            arguments.run, out=arguments.out, on_progress=tell, interrupt=stop, **given
        )
    if shrunk.result is None:
        print(f"not one of {shrunk.runs} runs broke what {arguments.run} had broken")
        return 130 if stop.is_set() else 1
    if arguments.report is not None:
        page = render_page(shrunk.result)
        arguments.report.write_text(page, encoding="utf-8", errors=ESCAPED)
    ended = "" if shrunk.complete else " (its runs or its time were used up)"
    left = len(shrunk.result.plan.strikes)
    print(f"{shrunk.before} faults shrunk to {left} in {shrunk.runs} runs{ended}")
    print(_how_often(shrunk))
    for strike in shrunk.result.plan.strikes:
        point = f" @{strike.point}" if strike.point else ""
        lasts = f" for {strike.seconds:g} s" if strike.seconds else ""
        print(f"  at {strike.at:g} s  {strike.fault} {strike.target}{point}{lasts}")
    print(f"\n{shrunk.result.violations[0].render()}")
    print(f"\nagain with\n  {_again(shrunk.result, shrunk.home)}")
    return 130 if stop.is_set() else 0


def _how_often(shrunk: Shrunk) -> str:
    """Return how far it can be relied on to fail again."""
    whole = f"all {shrunk.before} had failed in {shrunk.whole} replays"
    if not shrunk.smallest.made:
        return f"not replayed; {whole}\n"
    told = f"it failed in {shrunk.smallest} replays; {whole}\n"
    if not shrunk.is_flaky:
        return told
    if shrunk.refuted:
        told += f"smaller, failed once and then no more, so not taken: {shrunk.refuted}\n"
    return f"flaky: {told}one run that holds shows nothing: make several, or raise --repeat\n"


def _again(result: ChaosResult, home: str | None) -> str:
    """Return the command that runs it again, with a target that is imported from *home*."""
    plan = result.plan
    assert result.record is not None
    words = ["env", f"PYTHONPATH={home}"] if home and home != str(Path.cwd()) else []
    words += ["phalanx", "chaos", result.target, "--schedule", str(result.record / "schedule.json")]
    words += ["--duration", f"{plan.duration:g}", "--seed", str(plan.seed)]
    words += ["--callers", str(plan.callers), "--call-timeout", f"{plan.call_timeout:g}"]
    words += ["--recovery-limit", f"{plan.recovery_limit:g}"]
    words += ["--keep-intensity"] if plan.keep_intensity else []
    return shlex.join(words)
