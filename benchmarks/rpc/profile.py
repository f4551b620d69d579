"""``python -m benchmarks profile``: how much of a call each of its steps takes.

Guarantees: the steps of a call follow each other without a gap, so that they add up to the call.

The steps are separated by the times at which driver and workers enter and leave a few functions;
the clock is the same in all processes of a machine. With several ranks those of the rank count that
answers last. Noting the moments adds some two microseconds to a call.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import TYPE_CHECKING, Any

from benchmarks.contestants import phalanx_group
from benchmarks.harness.arguments import add_json, count, give, several, size
from benchmarks.harness.machine import describe, sentence
from benchmarks.harness.stats import percentile
from benchmarks.harness.tables import ranks_in_words, seconds, table
from phalanx import Executor, Runtime
from phalanx.actors.calls.call import Call
from phalanx.actors.calls.plane import CallPlane
from phalanx.actors.calls.sender import Sender
from phalanx.actors.group import handle
from phalanx.actors.worker_side.user_object import WorkerHost
from phalanx.runtime.worker import inbox
from phalanx.runtime.worker.replies import ReplyQueue

from .run import EMPTY, FORMS, Message

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

STEPS = (
    *("check", "encode", "copy", "send", "wake", "decode", "run", "reply", "wake driver"),
    *("match", "decode reply"),
)
_WARM = 50
_clock = time.perf_counter_ns
_Marks = dict[str, list[int]]


class Profiled(phalanx_group.Echo):
    """The worker of the benchmarks, which notes when it is where."""

    def install(self) -> None:
        """Note from the next call on."""
        self._marks = _noted(_WORKER)

    def begin(self) -> None:
        """Forget what was noted; the end of this very call is noted already."""
        _forget(self._marks)

    def end(self) -> _Marks:
        """Return what was noted since `begin`."""
        return self._marks


_DRIVER: tuple[tuple[Any, str], ...] = (
    (handle, "encode"),
    (CallPlane, "pack"),
    (Sender, "send"),
    (CallPlane, "_on_ready"),
    (Call, "result"),
)
_WORKER: tuple[tuple[Any, str], ...] = (
    (inbox, "receive"),
    (WorkerHost, "invoke"),
    (ReplyQueue, "answer"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("--ranks", type=several(count), default=[1, 4, 8], metavar="1,4,8")
    parser.add_argument("--sizes", type=several(size), default=[0, 1 << 16, 1 << 20])
    parser.add_argument("--calls", type=count, default=500)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; return the exit code."""
    flat = [Message(each, form) for form in FORMS[:2] for each in arguments.sizes if each]
    there = [*flat, Message(1, FORMS[2])]
    messages = [EMPTY, *there, *(each._replace(back=True) for each in there)]
    found: dict[str, Any] = {"machine": describe(), "calls": []}
    parts = [sentence(found["machine"])]
    for ranks in arguments.ranks:
        for message, spent in _profiles(ranks, messages, arguments.calls):
            row = {step: percentile(times, 50) / 1e9 for step, times in spent.items()}
            found["calls"].append({"ranks": ranks, **message._asdict(), **row})
        rows = [each for each in found["calls"] if each["ranks"] == ranks]
        lines: list[tuple[str, ...]] = []
        for message, row in zip(messages, rows, strict=True):
            shares = [f"{row[step] / row['all']:.0%}" for step in STEPS]
            lines.append((str(message), seconds(row["all"]), *shares))
        parts.append(f"{ranks_in_words(ranks)}\n\n" + table(("to", "median", *STEPS), lines))
    give(arguments, found, "\n\n".join(parts))
    return 0


def _profiles(ranks: int, messages: list[Message], calls: int) -> Iterator[tuple[Message, _Marks]]:
    """Yield the nanoseconds of each step, and of the whole, for each of *calls*."""
    marks = _noted(_DRIVER)
    try:
        with (
            Runtime(console=None) as runtime,
            Executor(Profiled, ranks, devices="cpu", runtime=runtime) as ours,
        ):
            ours.collective_rpc("install")
            for message in messages:
                yield message, _profile(ours, message, calls, marks)
    finally:
        for owner, name in _DRIVER:
            setattr(owner, name, getattr(owner, name).__wrapped__)


def _profile(ours: Executor[Profiled], message: Message, calls: int, marks: _Marks) -> _Marks:
    payload = phalanx_group.PhalanxGroup().payload(message.form, message.size)
    method, args = ("kept", ()) if message.back else ("nothing", (payload,) * bool(message.size))
    if message.back:
        ours.collective_rpc("keep", args=(payload,))
    for _ in range(_WARM):
        ours.collective_rpc(method, args=args)
    ours.collective_rpc("begin")
    _forget(marks)
    begun: list[int] = []
    ended: list[int] = []
    for _ in range(calls):
        begun.append(_clock())
        ours.collective_rpc(method, args=args)
        ended.append(_clock())
    workers: list[_Marks] = ours.collective_rpc("end")
    return _steps(begun, ended, marks, workers)


def _steps(begun: list[int], ended: list[int], marks: _Marks, workers: list[_Marks]) -> _Marks:
    spent: dict[str, list[int]] = {step: [] for step in (*STEPS, "all")}
    ready = iter(marks["_on_ready"])
    latest = next(ready)
    for at, start in enumerate(begun):
        # The first of the ends that a worker has noted are those of `begin`.
        last = max(workers, key=lambda worker: worker["answer end"][at + 1])
        done = marks["result"][at]
        while (following := next(ready, ended[-1])) < done:
            latest = following
        woken, latest = latest, following
        # A call without arguments is encoded and copied once for all.
        coded = _within(marks, "encode", at, start, len(begun))
        moved = _within(marks, "pack", at, coded[1], len(begun))[1]
        moments = (
            *(start, *coded, moved, marks["send end"][at], last["receive end"][at]),
            *(last["invoke"][at], last["invoke end"][at + 1], last["answer end"][at + 1]),
            *(woken, done, ended[at]),
        )
        for step, (before, after) in zip(STEPS, itertools.pairwise(moments), strict=True):
            spent[step].append(after - before)
        spent["all"].append(ended[at] - start)
    return spent


def _within(marks: _Marks, name: str, at: int, start: int, calls: int) -> tuple[int, int]:
    if len(marks[name]) < calls:
        return start, start
    return marks[name][at], marks[f"{name} end"][at]


def _noted(where: tuple[tuple[Any, str], ...]) -> _Marks:
    """Note from now on when each function is entered and left."""
    marks: _Marks = {}
    for owner, name in where:
        before, after = marks.setdefault(name, []), marks.setdefault(f"{name} end", [])
        setattr(owner, name, _noting(getattr(owner, name), before, after))
    return marks


def _forget(marks: _Marks) -> None:
    for times in marks.values():
        times.clear()


def _noting(
    function: Callable[..., Any], before: list[int], after: list[int]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def note(*args: Any, **kwargs: Any) -> Any:
        before.append(_clock())
        try:
            return function(*args, **kwargs)
        finally:
            after.append(_clock())

    return note
