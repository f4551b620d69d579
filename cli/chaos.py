"""``phalanx chaos run|shrink``: inject faults into a target under load, and check its history.

Guarantees:
- Exit code of ``run``: 0 if every invariant held; 1 if one was broken, or no fault or no call was
  made; 130 after Ctrl-C. Of ``shrink``: 0 if a schedule that fails was found, 1 if none fails.
- The result so far is printed in every case but 2, in which nothing was started.
- Output of the target goes into the folder of the run.
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
from dataclasses import replace
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
from phalanx.supervision import CallerError, PhalanxError, SpecError

from .manual import add_page
from .terminal import ESCAPED, ctrl_c, output_to

if TYPE_CHECKING:
    import argparse

    from phalanx.chaos import ChaosResult, Progress

_FOLDER = "chaos-runs"
_QUIET_LINE = 5.0  # seconds between lines of progress, if stderr is no terminal
OUTPUT = "output.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_it, shrink = (add_page(actions, f"chaos {action}") for action in ("run", "shrink"))
    faults = "\n  ".join(["faults:", *(f"{f.name}: {f.about}" for f in FAULTS.values())])
    run_it.epilog = f"{faults}\n\n{run_it.epilog}"
    _add_plan(run_it)
    add = shrink.add_argument
    add("run", metavar="RUN", help="the folder of a run that broke something")
    add("--runs", type=int, default=100, metavar="N", help="runs at most (100)")
    add("--repeat", type=int, default=2, metavar="N", help="runs for each candidate (2)")
    add("--limit", type=float, default=600.0, metavar="S", help="seconds at most (600)")
    for each in (run_it, shrink):
        add = each.add_argument
        add("--out", type=Path, metavar="DIR", help=f"where the record goes (in {_FOLDER})")
        add("--report", type=Path, metavar="FILE.html", help="write the run as one page of HTML")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    where = "a function that returns an executor, or (executor, traffic); or a worker class"
    add("target", metavar="module:factory", help=where)
    add("--duration", type=float, default=60.0, metavar="S", help="seconds of faults (60)")
    add("--rate", type=float, default=1.0, metavar="N", help="faults per second (1)")
    add("--faults", default="kill", metavar="LIST", help="fault[:target][@point],... (kill)")
    add("--seed", type=int, metavar="N", help="what the faults are drawn from (a new one)")
    whom = f"for faults without one: {', '.join(TARGETS)}, or a rank (random)"
    add("--targets", default="random", metavar="LIST", help=whom)
    points = "injection points: before_send, queued, running, after_reply, ..."
    add("--at", default="", metavar="LIST", help=points)
    add("--schedule", type=Path, metavar="FILE", help="the faults themselves, as a JSON list")
    add("--callers", type=int, default=4, metavar="N", help="threads that make calls (4)")
    limit = "seconds for a call of the default workload (5)"
    add("--call-timeout", type=float, default=5.0, metavar="S", help=limit)
    heals = "seconds to serve again after the last fault (60)"
    add("--recovery-limit", type=float, default=60.0, metavar="S", help=heals)
    keep = "let the target keep its restart intensity, and build it again when it gives up"
    add("--keep-intensity", action="store_true", help=keep)
    add("--json", action="store_true", help="print the figures as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run or shrink."""
    _check_report(arguments.report)
    return _shrink(arguments) if arguments.action == "shrink" else _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
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
    except CallerError:
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
            out=arguments.out,
            on_progress=tell,
            interrupt=stop,
        )
    if shrunk.result is None:
        print(f"not one of {shrunk.runs} runs broke what {arguments.run} had broken")
        return 130 if stop.is_set() else 1
    _write_report(arguments.report, shrunk.result)
    ended = "" if shrunk.complete else " (its runs or its time were used up)"
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
    print(f"\nagain with\n  {_again(shrunk.result)}")
    return 130 if stop.is_set() else 0


def _again(result: ChaosResult) -> str:
    """Return the command that runs it again."""
    plan = result.plan
    assert result.record is not None
    words = ["phalanx", "chaos", result.target, "--schedule", str(result.record / "schedule.json")]
    words += ["--duration", f"{plan.duration:g}", "--seed", str(plan.seed)]
    words += ["--callers", str(plan.callers), "--call-timeout", f"{plan.call_timeout:g}"]
    words += ["--recovery-limit", f"{plan.recovery_limit:g}"]
    words += ["--keep-intensity"] if plan.keep_intensity else []
    return shlex.join(words)


def _check_report(path: Path | None) -> None:
    """Refuse a page that cannot be written, before the run takes its minutes."""
    if path is None:
        return
    there = path.exists()
    try:
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
    schedule = None
    if arguments.schedule is not None:
        try:
            schedule = Schedule.from_json(arguments.schedule.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError("schedule", str(arguments.schedule), str(error)) from error
    plan = Chaos(
        duration=arguments.duration,
        rate=arguments.rate,
        faults=arguments.faults,
        seed=arguments.seed,
        targets=arguments.targets,
        points=arguments.at,
        schedule=schedule,
        callers=arguments.callers,
        call_timeout=arguments.call_timeout,
        keep_intensity=arguments.keep_intensity,
        recovery_limit=arguments.recovery_limit,
        record=arguments.out,
    )
    folder = _new_folder(arguments.target, plan.seed) if plan.record is None else plan.record
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"cannot be made: {error.strerror}; name another folder with --out"
        raise SpecError("record", str(folder), remedy) from error
    return replace(plan, record=folder), folder


def _new_folder(target: str, seed: int) -> Path:
    stem = re.sub(r"\W+", "-", target).strip("-")
    name = f"{stem}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(_FOLDER).resolve() / name
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    return folder


class _ProgressLine:
    """The progress of a run: one line, redrawn on a terminal, written now and then elsewhere."""

    def __init__(self) -> None:
        self._stream: TextIO = os.fdopen(os.dup(2), "w", errors=ESCAPED)
        self._written = 0.0
        self._drawn = False

    def show(self, progress: Progress) -> None:
        calls = " ".join(f"{name}={count}" for name, count in sorted(progress.calls.items()))
        line = (
            f"{progress.seconds:5.1f}/{progress.duration:g} s  {progress.state}  "
            f"faults {progress.injected}/{progress.planned}  restarts {progress.restarts}  {calls}"
        )
        if self._stream.isatty():
            self._drawn = True
            width = os.get_terminal_size(self._stream.fileno()).columns
            self._stream.write(f"\r\x1b[K{line[: width - 1]}")
        elif time.monotonic() - self._written >= _QUIET_LINE:
            self._written = time.monotonic()
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the line."""
        self._stream.write("\n" if self._drawn else "")
        self._stream.close()
