"""``python -m benchmarks rpc``: a table, a picture and figures of what a call takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.arguments import (
    add_json,
    add_peer_env,
    check_writable,
    count,
    give,
    one_of,
    several,
    size,
    span,
)
from benchmarks.harness.roster import ENTRIES, FOREIGN, TRANSPORTS, choose
from benchmarks.harness.venvs import Environments
from phalanx.supervision import SpecError

from . import plot
from .run import FORMS, Plan, RpcRun
from .table import text, values

if TYPE_CHECKING:
    import argparse

_PICTURE = "phalanx-rpc.png"
_MESSAGES = Plan(
    ranks=(1, 4, 8),
    sizes=(0, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20),
    forms=FORMS,
    back=True,
    seconds=0.05,
    rest=0.0,
    growth=False,
)
_QUICK = Plan(ranks=(1, 4), sizes=(0, 1 << 20), rounds=6, seconds=0.05, rest=1.0, growth=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    whole = Plan()
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--quick", action="store_true", help="two minutes instead of half an hour")
    parser.add_argument(
        "--messages", action="store_true", help="up to 1 MiB, in all forms and both directions"
    )
    parser.add_argument("--ranks", type=several(count), metavar="1,2,4,8")
    parser.add_argument("--sizes", type=several(size), metavar="0,64K,8M", help="of the argument")
    forms = several(one_of(FORMS))
    parser.add_argument("--forms", type=forms, metavar=",".join(FORMS), help="of it")
    parser.add_argument("--back", action="store_true", default=None, help="as a value as well")
    parser.add_argument("--rounds", type=count, help=f"{whole.rounds} by default")
    parser.add_argument("--seconds", type=span, help="of one turn; a slow call takes longer")
    parser.add_argument("--rest", type=span, help="seconds to watch at rest; 0 for not at all")
    parser.add_argument("--growth", action="store_true", default=None, help="with 64 ranks as well")
    parser.add_argument("--no-growth", dest="growth", action="store_false", default=None)
    only = several(one_of(names))
    parser.add_argument("--only", type=only, metavar=",".join(names), help="the contestants")
    parser.add_argument(
        "--transports", action="store_true", help=f"{' and '.join(TRANSPORTS)} take part as well"
    )
    parser.add_argument(
        "--peers",
        type=several(one_of((*FOREIGN, "all", "none"))),
        nargs="?",
        const=["all"],
        default=["all"],
        metavar="all|none|NAMES",
        help="those in separate environments; by default all that are installed",
    )
    add_peer_env(parser)
    add_json(parser)
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help=f"where to draw a picture; by default {_PICTURE}, if matplotlib is installed",
    )
    parser.add_argument("--no-plot", action="store_true", help="draw none")


def run(arguments: argparse.Namespace) -> int:
    """Measure; return 130 where Ctrl-C ended it, with what there was by then."""
    check_writable("json", arguments.json)
    check_writable("plot", arguments.plot)
    picture = _picture(arguments)
    present, absent = choose(
        arguments.only,
        arguments.peers,
        Environments(arguments.peer_env),
        TRANSPORTS if arguments.transports else (),
    )
    run = RpcRun(present, absent, _plan(arguments))
    code = 0
    try:
        run.run()
    except KeyboardInterrupt:
        print("\nended by Ctrl-C; this is what there was", file=sys.stderr)
        code = 130
    if sys.stderr.isatty():
        print(file=sys.stderr)
    give(arguments, values(run.found), text(run.found))
    if picture is not None:
        plot.draw(run.found, picture)
        print(f"drawn in {picture}", file=sys.stderr)
    return code


def _picture(arguments: argparse.Namespace) -> Path | None:
    """Return where to draw; without matplotlib that is a mistake only where it was asked for."""
    can_draw = plot.can_draw()
    if arguments.no_plot or (arguments.plot is None and not (can_draw and os.access(".", os.W_OK))):
        return None
    if not can_draw:
        raise SpecError("plot", arguments.plot, "matplotlib is missing: install 'phalanx[bench]'")
    return Path(arguments.plot or _PICTURE)


def _plan(arguments: argparse.Namespace) -> Plan:
    base = _QUICK if arguments.quick else _MESSAGES if arguments.messages else Plan()
    return Plan(
        ranks=arguments.ranks or base.ranks,
        sizes=base.sizes if arguments.sizes is None else arguments.sizes,
        forms=arguments.forms or base.forms,
        back=base.back if arguments.back is None else arguments.back,
        rounds=arguments.rounds or base.rounds,
        seconds=base.seconds if arguments.seconds is None else arguments.seconds,
        rest=base.rest if arguments.rest is None else arguments.rest,
        growth=base.growth if arguments.growth is None else arguments.growth,
        pipelined=base.pipelined,
        calls=base.calls,
    )
