"""``phalanx chaos``: do faults to a target under traffic, and say whether it lost anything.

Guarantees: the exit code is 0 if every invariant held, 1 if one was broken or if no fault or no
call was made, 2 where what was asked for makes no sense and nothing was started, 130 after Ctrl-C;
the closing table is printed in every case but 2. What the target itself prints goes into the run's
folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
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
)
from phalanx.runtime import safe_text
from phalanx.supervision import CallerError, PhalanxError, SpecError

from .output import ESCAPED

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator
    from types import FrameType

    from phalanx.chaos import Progress

_FOLDER = "chaos-runs"
_QUIET_LINE = 5.0  # seconds between lines where there is no terminal
OUTPUT = "output.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of this subcommand."""
    parser.epilog = "faults: " + "; ".join(f"{f.name} ({f.about})" for f in FAULTS.values())
    add = parser.add_argument
    where = (
        "a function that returns an executor, or (executor, traffic); a worker class; an example"
    )
    add("target", metavar="EXAMPLE|module:factory|shrink", help=where)
    of_shrink = "with shrink: the folder of a run that broke something"
    add("run", nargs="?", metavar="RUN", help=f"{of_shrink}; a smaller schedule is looked for")
    add("--runs", type=int, metavar="N", help="with shrink: runs at most (100)")
    add("--repeat", type=int, metavar="N", help="with shrink: runs for each candidate (2)")
    add("--limit", type=float, metavar="S", help="with shrink: seconds at most (600)")
    add("--duration", type=float, default=60.0, metavar="S", help="seconds of faults (60)")
    add("--rate", type=float, default=1.0, metavar="N", help="faults per second (1)")
    names = "fault[:target][@point],... (kill)"
    add("--faults", default="kill", metavar="LIST", help=names)
    add("--seed", type=int, metavar="N", help="what the faults are drawn from (a new one)")
    whom = f"for faults without one: {', '.join(TARGETS)}, or a rank (random)"
    add("--targets", default="random", metavar="LIST", help=whom)
    moments = "moments that faults may be aimed at: before_send, queued, running, after_reply, ..."
    add("--at", default="", metavar="LIST", help=moments)
    add("--schedule", type=Path, metavar="FILE", help="the faults themselves, as a JSON list")
    add("--callers", type=int, default=4, metavar="N", help="threads that make calls (4)")
    limit = "seconds for a call of the traffic made for a target without its own (5)"
    add("--call-timeout", type=float, default=5.0, metavar="S", help=limit)
    heals = "seconds to serve again after the last fault (60)"
    add("--recovery-limit", type=float, default=60.0, metavar="S", help=heals)
    keep = "let the target keep its restart intensity, and build it again when it gives up"
    add("--keep-intensity", action="store_true", help=keep)
    add("--out", type=Path, metavar="DIR", help=f"where the record goes (a new one in {_FOLDER})")
    add("--report", type=Path, metavar="FILE.html", help="write the run as one page of HTML")
    add("--json", action="store_true", help="print the figures as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run it; return the exit code."""
    if arguments.target == "shrink":
        from .shrink import run as shrink

        return shrink(arguments)
    for name in ("run", "runs", "repeat", "limit"):
        if getattr(arguments, name) is not None:
            raise SpecError(name, getattr(arguments, name), "is for: phalanx chaos shrink RUN")
    target = Target.of(arguments.target)
    check_report(arguments.report)
    plan = _plan(arguments)
    stop = threading.Event()
    shown = os.fdopen(os.dup(2), "w", errors=ESCAPED)
    live = _Live(shown)
    try:
        assert plan.record is not None
        try:
            with ctrl_c(stop), output_to(plan.record / OUTPUT):
                result = run_chaos(target, plan, on_progress=live.show, interrupt=stop)
        except KeyboardInterrupt:  # the second one: what there is of it is told all the same
            result = replace(load_run(plan.record), interrupted=True)
    except CallerError:
        _forget(plan)
        raise
    except Exception as error:  # noqa: BLE001  # the target's own, told as Python tells it
        live.end()
        told = [f"phalanx chaos: {error}"]
        if not isinstance(error, PhalanxError):
            told = traceback.format_exception(error)
        print("\n".join(map(safe_text, "".join(told).splitlines())), file=sys.stderr)
        print(f"the target's output is in {plan.record}", file=sys.stderr)
        return 1
    live.end()
    print(result.to_json() if arguments.json else result.render())
    if arguments.report is not None:
        arguments.report.write_text(render_page(result), encoding="utf-8", errors=ESCAPED)
    if result.violations:
        return 1
    if result.interrupted:
        return 130
    return 0 if result.ok else 1


def check_report(path: Path | None) -> None:
    """Refuse a page that could not be written before minutes have gone into what stands on it."""
    if path is None:
        return
    if path.is_dir():
        raise SpecError("report", str(path), "name a file, not a folder")
    there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        remedy = f"{error.strerror}; name a file in a folder that may be written to"
        raise SpecError("report", str(path), remedy) from error
    if not there:
        path.unlink()


def _plan(arguments: argparse.Namespace) -> Chaos:
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
    if plan.record is None:
        object.__setattr__(plan, "record", _new_folder(arguments.target, plan.seed))
    assert plan.record is not None
    try:
        plan.record.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"cannot be made: {error.strerror}; name another folder with --out"
        raise SpecError("record", str(plan.record), remedy) from error
    return plan


def _new_folder(target: str, seed: int) -> Path:
    stem = re.sub(r"\W+", "-", target).strip("-")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"{stem}-seed{seed}-{stamp}"
    folder = Path(_FOLDER).resolve() / name
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{name}-{number}")
    return folder


def _forget(plan: Chaos) -> None:
    """Remove the folder of a run that never was: it was new, or empty."""
    if plan.record is not None:
        with contextlib.suppress(OSError):
            shutil.rmtree(plan.record)
            if plan.record.parent.name == _FOLDER:
                plan.record.parent.rmdir()


@contextlib.contextmanager
def ctrl_c(stop: threading.Event) -> Generator[None, None, None]:
    """Have Ctrl-C end what runs in good order; a second one ends it at once."""

    def on_sigint(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def output_to(path: Path) -> Generator[None, None, None]:
    """Have what this process and its workers print go to *path*: it would bury the progress."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, fd in zip((1, 2), kept, strict=True):
            os.dup2(fd, number)
            os.close(fd)


class _Live:
    """How far the run is: one line, drawn anew on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = 0.0
        self._drawn = False

    def show(self, progress: Progress) -> None:
        """Draw it, or write a line of it now and then."""
        calls = " ".join(f"{name}={count}" for name, count in sorted(progress.calls.items()))
        line = (
            f"{progress.seconds:5.1f}/{progress.duration:g} s  {progress.state}  "
            f"faults {progress.struck}/{progress.strikes}  restarts {progress.restarts}  {calls}"
        )
        if self._stream.isatty():
            self._drawn = True
            self._stream.write(f"\r\x1b[K{line[: _width(self._stream) - 1]}")
        elif time.monotonic() - self._told >= _QUIET_LINE:
            self._told = time.monotonic()
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._drawn:
            self._stream.write("\n")
        self._stream.close()


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 100
