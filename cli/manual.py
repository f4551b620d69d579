"""The page of each subcommand: what it is for, its exit codes, examples.

Each page is the ``--help`` of its subcommand; its arguments are described where they are declared.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDTH = 80
_USAGE = "2  the command line makes no sense, or no running driver is the one that it names"
_WRONG = "2  the command line makes no sense"
_INTERRUPT = "130  Ctrl-C"


class Page(NamedTuple):
    """What ``--help`` says of a subcommand, beside its arguments.

    Attributes:
        summary: One line, for the list of subcommands.
        purpose: What it does, and what it needs, in a few sentences.
        exit_codes: One line each: the number, then when it is returned.
        examples: Command lines that are valid as they stand.
    """

    summary: str
    purpose: str
    exit_codes: tuple[str, ...]
    examples: tuple[str, ...]


PAGES: Mapping[str, Page] = {
    "chaos": Page(
        "inject faults into workers under load, and check that nothing is lost",
        "Without an action it is `chaos run`. Guide: docs/reference/chaos.md.",
        ("those of the action",),
        ("phalanx chaos mine:build --duration 30", "phalanx chaos shrink chaos-runs/1"),
    ),
    "chaos run": Page(
        "run a target under faults (the default action)",
        "Builds the target, calls its workers from several threads, and injects faults into their "
        "processes by a schedule drawn from a seed. Then checks invariants on the history of the "
        "run: of calls, of restarts, and of what is left behind. The record of the run goes to a "
        "folder; `phalanx chaos shrink` looks in it for the fewest faults that break the same.",
        (
            "0  PASS: every invariant holds",
            "1  FAIL, or INCONCLUSIVE: no fault could be injected, or no call was made",
            _WRONG,
            "130  Ctrl-C, if nothing failed until then",
        ),
        (
            "phalanx chaos mine:build --duration 30 --faults kill,stop",
            "phalanx chaos mine:build --seed 7 --report run.html",
        ),
    ),
    "chaos shrink": Page(
        "look for a smaller schedule that breaks what a run broke",
        "Replays the schedule of a run that failed with fewer and fewer faults, and keeps the "
        "smallest that still fails, in a form that can be run again.",
        ("0  a schedule that fails was found", "1  none fails", _WRONG, _INTERRUPT),
        ("phalanx chaos shrink chaos-runs/1 --runs 50 --repeat 3",),
    ),
    "completion": Page(
        "print a script that completes phalanx's command line in a shell",
        "Prints to stdout. It completes subcommands, options, their choices and file names. "
        "Needs the extra phalanx[cli].",
        ("0  printed", "1  the extra is not installed", _WRONG),
        (
            "phalanx completion bash > ~/.local/share/bash-completion/completions/phalanx",
            'phalanx completion zsh > "${fpath[1]}/_phalanx"',
        ),
    ),
    "doctor": Page(
        "check what phalanx needs of this machine",
        "Checks kernel, packages, devices, limits and the start of one process, and says what to "
        "do about each shortcoming. It changes nothing.",
        ("0  all required checks passed", "1  something that phalanx needs is missing", _WRONG),
        ("phalanx doctor", "phalanx doctor --json"),
    ),
    "health": Page(
        "say whether the groups of a running driver are complete",
        "Asks the driver once and prints one line, for the probes of a container or a service. "
        "Any user's mistake in choosing the driver is a failed check as well.",
        (
            "0  every group serves with all of its ranks",
            "1  a rank is missing, the driver does not answer, or there is no such driver",
            "2  an option makes no sense",
            _INTERRUPT,
        ),
        ("phalanx health", "phalanx health --live --timeout 2 trainer"),
    ),
    "logs": Page(
        "follow output, log records and events of a running driver",
        "Prints what the driver and its workers write from now on, until the driver ends.",
        ("0  the driver has ended, or the reader of stdout has", _USAGE, _INTERRUPT),
        ("phalanx logs trainer --rank 3 --level warning", "phalanx logs --json --kind event"),
    ),
    "metrics": Page(
        "serve metrics and health routes of a running driver for Prometheus",
        "Serves /metrics, /healthz and /readyz over HTTP from outside of the driver. Needs the "
        "extra phalanx[prometheus]. Guide: docs/reference/metrics.md.",
        (
            "0  the driver that was named by its pid has ended, or a file was printed",
            "1  there is no such process, the port cannot be had, or the extra is not installed",
            _WRONG,
            _INTERRUPT,
        ),
        (
            "phalanx metrics trainer --port 9464 --label job=nightly",
            "phalanx metrics --print alerts > alerts.yml",
        ),
    ),
    "reports": Page(
        "list and show crash reports",
        "Without an action it is `reports list`. Guide: docs/howto/reports.md.",
        ("those of the action",),
        ("phalanx reports /var/log/crashes", "phalanx reports show latest"),
    ),
    "reports list": Page(
        "list the reports of a folder, the newest first (the default action)",
        "A file that is no report is passed over, with a note on stderr.",
        ("0  listed, also if there are none", "2  the command line makes no sense, or no folder"),
        ("phalanx reports list /var/log/crashes --since 2h --reason killed",),
    ),
    "reports show": Page(
        "show one report: what died, of what, doing what, and what was decided",
        "Control characters in what workers wrote are escaped.",
        ("0  shown", "2  the command line makes no sense, or there is no such report"),
        ("phalanx reports show latest /var/log/crashes",),
    ),
    "top": Page(
        "show the groups and trees of a running driver, live",
        "Looks from outside at the supervisors, groups and ranks of a driver: what they run, what "
        "they have served, their memory and their restarts. Ctrl-C ends it. Needs the extra "
        "phalanx[cli], except with --json.",
        (
            "0  the driver has ended, or one picture was asked for",
            "1  the driver does not answer, or the extra is not installed",
            _USAGE,
            _INTERRUPT,
        ),
        ("phalanx top", "phalanx top trainer --once"),
    ),
    "torchrun": Page(
        "run a script for torchrun on ranks that are restarted at once",
        "Takes torchrun's command line and environment variables (PET_*), on one machine. Options "
        "that have no use here are accepted, with a note. Needs the extra phalanx[torch]. "
        "Guide: docs/howto/torchrun.md.",
        ("0  every rank has succeeded", "1  the run has failed, or a signal has ended it", _WRONG),
        ("phalanx torchrun --standalone --nproc-per-node 4 train.py --epochs 3",),
    ),
    "web": Page(
        "serve a read-only page of a running driver",
        "Serves a live page of supervisors, groups, ranks, events and crash reports, and the same "
        "as /state.json. Who can reach the address can read it.",
        (
            "0  the driver that was named by its pid has ended",
            "1  there is no such process, or the port cannot be had",
            _WRONG,
            _INTERRUPT,
        ),
        ("phalanx web trainer --port 9465",),
    ),
}


def add_page(subparsers: Any, name: str) -> argparse.ArgumentParser:
    """Add the subcommand or action *name*, with its page, to *subparsers*; return its parser."""
    page = PAGES[name]
    lines = [*textwrap.wrap(f"{page.summary[0].upper()}{page.summary[1:]}.", _WIDTH), ""]
    codes = "\n  ".join(["exit codes:", *page.exit_codes])
    examples = "\n  ".join(["examples:", *page.examples])
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name.rpartition(" ")[2],
        help=page.summary,
        description="\n".join([*lines, *textwrap.wrap(page.purpose, _WIDTH)]),
        epilog=f"{codes}\n\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser
