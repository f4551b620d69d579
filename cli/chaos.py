"""Inject faults into workers under load, and check that nothing is lost.

Without an action it is `chaos run`. Guide: docs/reference/chaos.md.

Exit codes:
  those of the action

Examples:
  phalanx chaos mine:build --duration 30
  phalanx chaos shrink chaos-runs/1
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phalanx.chaos import (
    FAULTS,
    TARGETS,
    Chaos,
    Schedule,
    Target,
    load_run,
    render_page,
    run_chaos,
    shrink_run,
)
from phalanx.runtime import safe_text
from phalanx.supervision import PhalanxError, SpecError, require_package

from .terminal import ESCAPED, add_page, ctrl_c, output_to

if TYPE_CHECKING:
    import argparse

    from phalanx.chaos import ChaosResult, Progress

_FOLDER = "chaos-runs"
_QUIET_LINE = 5.0  # seconds between lines of progress, if stderr is no terminal
OUTPUT = "output.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_it, shrink = add_page(actions, "run", _run), add_page(actions, "shrink", _shrink)
    faults = "\n  ".join(["faults:", *(f"{f.name}: {f.about}" for f in FAULTS.values())])
    run_it.epilog = f"{faults}\n\n{run_it.epilog}"
    add = run_it.add_argument
    where = "a function that returns an executor, or (executor, traffic); or a worker class"
    add("target", metavar="module:factory", help=where)
    add("--duration", type=float, default=60.0, metavar="S", help="seconds of faults (60)")
    add("--rate", type=float, default=1.0, metavar="N", help="faults per second (1)")
    add("--faults", default="kill", metavar="LIST", help="fault[:target][@point],... (kill)")
    add("--seed", type=int, metavar="N", help="seed of the faults (a new one)")
    whom = f"for faults without one: {', '.join(TARGETS)}, or a rank (random)"
    add("--targets", default="random", metavar="LIST", help=whom)
    points = "injection points: before_send, queued, running, after_reply, ..."
    add("--at", dest="points", default="", metavar="LIST", help=points)
    add("--schedule", type=Path, metavar="FILE", help="the faults themselves, as a JSON list")
    add("--callers", type=int, default=4, metavar="N", help="threads that make calls (4)")
    limit = "seconds for a call of the default workload (5)"
    add("--call-timeout", type=float, default=5.0, metavar="S", help=limit)
    heals = "seconds to serve again after the last fault (60)"
    add("--recovery-limit", type=float, default=60.0, metavar="S", help=heals)
    keep = "let the target keep its restart intensity, and build it again when it gives up"
    add("--keep-intensity", action="store_true", help=keep)
    add("--json", action="store_true", help="print the figures as one JSON object")
    add = shrink.add_argument
    add("run", metavar="RUN", help="the folder of a run that broke something")
    add("--runs", type=int, default=100, metavar="N", help="runs at most (100)")
    add("--repeat", type=int, default=2, metavar="N", help="runs for each candidate (2)")
    add("--limit", type=float, default=600.0, metavar="S", help="seconds at most (600)")
    for each in (run_it, shrink):
        add = each.add_argument
        out = f"where the record goes (in {_FOLDER})"
        add("--out", dest="record", type=Path, metavar="DIR", help=out)
        add("--report", type=Path, metavar="FILE.html", help="write the run as one page of HTML")


def run(arguments: argparse.Namespace) -> int:
    """Run or shrink."""
    _check_report(arguments.report)
    return _shrink(arguments) if arguments.action == "shrink" else _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    """Run a target under faults (the default action).

    Builds the target, calls its workers from several threads, and injects faults
    into their processes by a schedule drawn from a seed. Then checks invariants on
    the history of the run: of calls, of restarts, and of what is left behind. The
    record of the run goes to a folder; `phalanx chaos shrink` looks in it for the
    fewest faults that break the same.

    Exit codes:
      0  PASS: every invariant holds
      1  FAIL, or INCONCLUSIVE: no fault could be injected, or no call was made
      2  the command line is invalid
      130  Ctrl-C, if nothing failed until then

    Examples:
      phalanx chaos mine:build --duration 30 --faults kill,stop
      phalanx chaos mine:build --seed 7 --report run.html
    """
    target = Target.of(arguments.target)
    plan, folder = _plan(arguments)
    stop = threading.Event()
    progress = _ProgressLine()
    try:
        try:
            with ctrl_c(stop), output_to(folder / OUTPUT):
                result = run_chaos(target, plan, on_progress=progress.show, interrupt=stop)
        except KeyboardInterrupt:  # the second one: the result so far is printed all the same
            result = replace(load_run(folder), interrupted=True)
    except SpecError:
        with contextlib.suppress(OSError):  # the folder of a run that never was: new, or empty
            shutil.rmtree(folder)
            if folder.parent.name == _FOLDER:
                folder.parent.rmdir()
        raise
    except Exception as error:  # noqa: BLE001  # the target's own, shown as Python shows it
        progress.end()
        shown = [f"phalanx chaos: {error}"]
        if not isinstance(error, PhalanxError):
            shown = traceback.format_exception(error)
        print("\n".join(map(safe_text, "".join(shown).splitlines())), file=sys.stderr)
        print(f"the target's output is in {folder}", file=sys.stderr)
        return 1
    progress.end()
    print(result.to_json() if arguments.json else result.render())
    _write_report(arguments.report, result)
    if result.interrupted and not result.violations:
        return 130
    return 0 if result.ok else 1


def _shrink(arguments: argparse.Namespace) -> int:
    """Look for a smaller schedule that breaks what a run broke.

    Replays the schedule of a run that failed with fewer and fewer faults, and keeps
    the smallest that still fails, in a form that can be run again.

    Exit codes:
      0  a schedule that fails was found
      1  none fails
      2  the command line is invalid
      130  Ctrl-C

    Examples:
      phalanx chaos shrink chaos-runs/1 --runs 50 --repeat 3
    """
    stop = threading.Event()
    with (
        os.fdopen(os.dup(2), "w", errors=ESCAPED) as shown,
        tempfile.TemporaryDirectory(prefix="chaos-output-") as folder,
        ctrl_c(stop),
        output_to(Path(folder) / OUTPUT),
    ):

        def tell(made: int, left: int) -> None:
            shown.write(f"run {made + 1}: {left} faults left\n")
            shown.flush()

        shrunk = shrink_run(
            arguments.run,
            runs=arguments.runs,
            repeat=arguments.repeat,
            seconds=arguments.limit,
            out=arguments.record,
            on_progress=tell,
            interrupt=stop,
        )
    if shrunk.result is None:
        print(f"not one of {shrunk.runs} runs broke what {arguments.run} had broken")
        return 130 if stop.is_set() else 1
    ended = "" if shrunk.complete else " (its runs or its time were used up, or one raised)"
    faults = shrunk.result.plan.planned
    print(f"{shrunk.before} faults shrunk to {len(faults)} in {shrunk.runs} runs{ended}")
    whole = f"all {shrunk.before} had failed in {shrunk.whole} replays"
    flaky = "flaky: " if shrunk.is_flaky else ""
    print(f"{flaky}it failed in {shrunk.smallest} replays; {whole}")
    if shrunk.is_flaky:
        print("one run that holds shows nothing: make several, or raise --repeat")
    print()
    for fault in faults:
        point = f" @{fault.point}" if fault.point else ""
        lasts = f" for {fault.seconds:g} s" if fault.seconds else ""
        print(f"  at {fault.at:g} s  {fault.fault} {fault.target}{point}{lasts}")
    print(f"\n{shrunk.result.violations[0].render()}")
    print(f"\nagain with\n  {_again(shrunk.result)}", flush=True)
    _write_report(arguments.report, shrunk.result)
    return 130 if stop.is_set() else 0


def _again(result: ChaosResult) -> str:
    """Return the command that runs it again."""
    plan = result.plan
    assert result.record is not None
    words = ["phalanx", "chaos", result.target, "--schedule", str(result.record / "schedule.json")]
    words += ["--duration", f"{plan.duration:g}", "--seed", str(plan.seed)]
    words += ["--callers", str(plan.callers), "--call-timeout", f"{plan.call_timeout:g}"]
    words += ["--recovery-limit", f"{plan.recovery_limit:g}"]
    return shlex.join([*words, *(["--keep-intensity"] * plan.keep_intensity)])


def _check_report(path: Path | None) -> None:
    """Refuse a page that cannot be written, before the run takes its minutes."""
    if path is not None:
        require_package("jinja2", "chaos")
        try:
            there = path.exists()
            path.open("a").close()
        except OSError as error:
            remedy = f"{error.strerror}; name a file in a folder that may be written to"
            raise SpecError("report", str(path), remedy) from error
        if not there:
            path.unlink()


def _write_report(path: Path | None, result: ChaosResult) -> None:
    if path is not None:
        path.write_text(render_page(result), encoding="utf-8", errors=ESCAPED)


def _plan(arguments: argparse.Namespace) -> tuple[Chaos, Path]:
    """Return the plan of the run and its folder, which is there."""
    given = {each.name: getattr(arguments, each.name) for each in fields(Chaos) if each.init}
    if arguments.schedule is not None:
        try:
            given["schedule"] = Schedule.from_json(arguments.schedule.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError("schedule", str(arguments.schedule), str(error)) from error
    plan = Chaos(**given)
    folder = plan.record or _new_folder(arguments.target, plan.seed)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"cannot be made: {error.strerror}; name another folder with --out"
        raise SpecError("record", str(folder), remedy) from error
    return replace(plan, record=folder), folder


def _new_folder(target: str, seed: int) -> Path:
    stem = re.sub(r"\W+", "-", target).strip("-")
    name = f"{stem}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(folder for each in names if not (folder := Path(_FOLDER).resolve() / each).exists())


class _ProgressLine:
    """The progress of a run: one line, redrawn on a terminal, written now and then elsewhere."""

    def __init__(self) -> None:
        self._stream: TextIO = os.fdopen(os.dup(2), "w", errors=ESCAPED)
        self._is_drawn = self._stream.isatty()
        self._due = 0.0

    def show(self, progress: Progress) -> None:
        calls = " ".join(f"{name}={count}" for name, count in sorted(progress.calls.items()))
        line = (
            f"{progress.seconds:5.1f}/{progress.duration:g} s  {progress.state}  "
            f"faults {progress.injected}/{progress.planned}  restarts {progress.restarts}  {calls}"
        )
        if self._is_drawn:
            width = os.get_terminal_size(self._stream.fileno()).columns
            print(f"\r\x1b[K{line[: width - 1]}", end="", file=self._stream, flush=True)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + _QUIET_LINE
            print(line, file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the line."""
        self._stream.write("\n" if self._is_drawn else "")
        self._stream.close()
