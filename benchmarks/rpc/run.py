"""`RpcRun`: how long a call takes, here and elsewhere, measured in turns.

Guarantees: in every round each contestant has its turn, in an order that changes from round to
round, so that drift of the machine falls on all alike; while one has its turn the processes of all
others are stopped. A contestant that breaks leaves the run with the reason; the others go on.

Elsewhere: the contestants (`roster`), the targets (`targets`), the output
(`rpc_table`, `plot`).
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.contestants.protocol import STRUCTURE_BYTES
from benchmarks.harness.machine import describe
from benchmarks.harness.process_group import adopt_orphans
from benchmarks.harness.roster import COPY, OURS
from benchmarks.harness.stats import of, percentile
from benchmarks.harness.subprocess_driver import ContestantBroke, Driven, link_package
from benchmarks.harness.tables import ranks_in_words
from benchmarks.harness.tables import size as bytes_in_words

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from benchmarks.harness.roster import Present
    from benchmarks.harness.stats import Samples

MIB = 1 << 20
SIZES = (0, 1 << 10, 64 << 10, MIB, 8 * MIB, 64 * MIB)
_OPEN = 240.0  # seconds: eight interpreters that each import much, on a slow disk
_TURN = 120.0
_SETTLE = 5.0  # seconds before rest is measured: some spin for one, we give memory back after two
_READ_FROM = 8 * MIB  # reading every byte is measured from here on
_WINDOW = 64
FEW, MOST = 8, 64  # ranks in the row that asks for growth

FORMS = ("tensor", "bytes", "structure")


class Message(NamedTuple):
    """What a call carries: bytes in one of `FORMS`, as its argument or *back* as its value."""

    size: int
    form: str = "tensor"
    back: bool = False

    def __str__(self) -> str:
        if not self.size:
            return "empty"
        words = "structure" if self.form == "structure" else bytes_in_words(self.size)
        words += " bytes" if self.form == "bytes" else ""
        return f"{words}, back" if self.back else words


EMPTY = Message(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        sizes: Bytes of the argument; 0 is a call without one.
        forms: What those bytes are; the size of a structure is fixed.
        back: Whether the same is measured as a value as well.
        seconds: How long a turn of one contestant at one size lasts, about.
        rest: Seconds for which processors at rest are watched; 0 leaves it out.
        growth: Whether empty calls to `FEW` and `MOST` ranks are measured as well.
    """

    ranks: Sequence[int] = (1, 2, 4, 8)
    sizes: Sequence[int] = SIZES
    forms: Sequence[str] = FORMS[:1]
    back: bool = False
    rounds: int = 10
    seconds: float = 0.2
    calls: int = 1000
    pipelined: int = 1000
    rest: float = 10.0
    growth: bool = True

    @property
    def messages(self) -> list[Message]:
        """The messages, the empty one first."""
        sizes = [size for size in self.sizes if size]
        flat = [form for form in self.forms if form != "structure"]
        there = [Message(size, form) for form in flat for size in sizes]
        if "structure" in self.forms:
            there.append(Message(STRUCTURE_BYTES, "structure"))
        back = [each._replace(back=True) for each in there] if self.back else []
        return [EMPTY] * (0 in self.sizes) + there + back


@dataclass(slots=True)
class Row:
    """One contestant at one number of ranks with one message, in seconds, a figure per round."""

    median: list[float] = field(default_factory=list[float])
    p99: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    read: list[float] = field(default_factory=list[float])
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Rest:
    """One contestant without calls.

    Attributes:
        driver_share: Of one processor, that the calling process uses.
        worker_share: Of one processor, that the busiest of its other processes uses.
        total_share: Of one processor, all its processes.
        pss_bytes: Memory of all its processes, what is shared counted once.
        shared_bytes: Shared memory that exists for it.
    """

    driver_share: float
    worker_share: float
    total_share: float
    pss_bytes: int
    shared_bytes: int
    processes: int


@dataclass(slots=True)
class Found:
    """What a run found."""

    machine: dict[str, Any]
    plan: Plan
    absent: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict[str, str])
    rows: dict[tuple[int, Message, str], Row] = field(default_factory=lambda: defaultdict(Row))
    pipelined: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    rest: dict[tuple[int, str], Rest] = field(default_factory=dict[tuple[int, str], Rest])
    growth: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    broken: dict[tuple[int, str], str] = field(default_factory=dict[tuple[int, str], str])

    def names(self) -> list[str]:
        """Return the contestants that were measured, in the order in which they are shown."""
        return list(self.versions)

    def series(
        self, ranks: int, message: Message, name: str, what: str = "median"
    ) -> Samples | None:
        """Return a figure of each round, None where there is none."""
        row = self.rows.get((ranks, message, name))
        return None if row is None else of(getattr(row, what))


class RpcRun:
    """One run.

    Args:
        present: The contestants.
        absent: Those that are missing, and the reasons.
        plan: What is measured.
    """

    def __init__(self, present: Sequence[Present], absent: dict[str, str], plan: Plan) -> None:
        self._present = present
        self._plan = plan
        self.found = Found(describe(), plan, absent)

    def run(self) -> Found:
        """Measure; say on stderr how far it is."""
        adopt_orphans()
        for ranks in self._plan.ranks:
            with self._opened(ranks, self._present) as all_open:
                self._measure(ranks, all_open)
        if self._plan.growth:
            self._measure_growth()
        return self.found

    def _measure(self, ranks: int, all_open: dict[str, Driven]) -> None:
        for number in range(self._plan.rounds):
            _progress(f"{ranks_in_words(ranks)}, round {number + 1} of {self._plan.rounds}")
            for message in self._plan.messages:
                for each in _in_turn(all_open, number):
                    self._turn(ranks, message, each, all_open)
            for each in _in_turn(all_open, number):
                self._turn_pipelined(ranks, each, all_open)
        if self._plan.rest:
            self._rest(ranks, all_open)

    # --- turns --------------------------------------------------------------------------

    def _turn(
        self, ranks: int, message: Message, each: Driven, all_open: dict[str, Driven]
    ) -> None:
        plan, key = self._plan, (ranks, message, each.name)
        size = message.size
        if each.name == COPY and (not size or message.form != "tensor" or message.back):
            return
        order: dict[str, Any] = {"method": "nothing", **message._asdict()}
        with self._its_turn(ranks, each, all_open):
            # Unmeasured ones first: it has just been stopped, and its caches are cold.
            each.ask("call", _TURN, times=20, seconds=0.02, least=1, **order)
            pids = each.family.pids()
            before = sum(each.family.cpu_ns(pids).values())
            spent = each.ask("call", _TURN, times=plan.calls, seconds=plan.seconds, **order)["ns"]
            used = sum(each.family.cpu_ns(pids).values()) - before
            row = self.found.rows[key]
            row.median.append(percentile(spent, 50) / 1e9)
            row.p99.append(percentile(spent, 99) / 1e9)
            row.cpu.append(used / len(spent) / 1e9)
            row.calls += len(spent)
            is_read = message == Message(size) and size >= _READ_FROM
            if is_read and each.name != COPY:
                order["method"] = "read"
                spent = each.ask("call", _TURN, times=3, seconds=0.0, least=1, **order)["ns"]
                row.read.append(percentile(spent, 50) / 1e9)

    def _turn_pipelined(self, ranks: int, each: Driven, all_open: dict[str, Driven]) -> None:
        if each.name == COPY or not self._plan.pipelined:
            return
        with self._its_turn(ranks, each, all_open):
            each.ask("pipeline", _TURN, times=_WINDOW * 2, window=_WINDOW)
            times = self._plan.pipelined
            took = each.ask("pipeline", _TURN, times=times, window=_WINDOW)["ns"]
            self.found.pipelined[ranks, each.name].append(times / took * 1e9)

    def _rest(self, ranks: int, all_open: dict[str, Driven]) -> None:
        """Watch all at once: the time that a process uses does not depend on the others."""
        _progress(f"{ranks_in_words(ranks)}, at rest for {self._plan.rest:g} s")
        for each in all_open.values():
            each.resume()
        time.sleep(_SETTLE)
        began = time.monotonic()
        pids = {each.name: each.family.pids() for each in all_open.values()}
        before = {each.name: each.family.cpu_ns(pids[each.name]) for each in all_open.values()}
        time.sleep(self._plan.rest)
        for each in all_open.values():
            after = each.family.cpu_ns(pids[each.name])
            span = (time.monotonic() - began) * 1e9
            used = {pid: (after[pid] - spent) / span for pid, spent in before[each.name].items()}
            self.found.rest[ranks, each.name] = Rest(
                driver_share=used.pop(each.pid, 0.0),
                worker_share=max(used.values(), default=0.0),
                total_share=sum(after.values()) / span - sum(before[each.name].values()) / span,
                pss_bytes=each.family.pss(pids[each.name]),
                shared_bytes=each.family.shared(pids[each.name]),
                processes=len(pids[each.name]),
            )

    def _measure_growth(self) -> None:
        """Alternate empty calls to few and to many ranks, of ours and of raw pyzmq."""
        entries = [each for each in self._present if each.entry.name in (OURS, "pyzmq")]
        with self._opened(FEW, entries) as few, self._opened(MOST, entries) as many:
            for number in range(self._plan.rounds):
                _progress(f"growth to {MOST} ranks, round {number + 1} of {self._plan.rounds}")
                for ranks, group in ((FEW, few), (MOST, many)):
                    for each in _in_turn(group, number):
                        with self._its_turn(ranks, each, group):
                            order = {"method": "nothing", "size": 0, "times": self._plan.calls}
                            each.ask("call", _TURN, seconds=0.05, **order)
                            took = each.ask("call", _TURN, seconds=self._plan.seconds, **order)
                            self.found.growth[ranks, each.name].append(
                                percentile(took["ns"], 50) / 1e9
                            )

    # --- contestants --------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, ranks: int, present: Sequence[Present]) -> Generator[dict[str, Driven]]:
        all_open: dict[str, Driven] = {}
        with tempfile.TemporaryDirectory(prefix="ph", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            link_package(folder)
            try:
                for each in present:
                    name = each.entry.name
                    _progress(f"{ranks_in_words(ranks)}, opening {name}")
                    try:
                        driven = Driven(
                            each.entry.module,
                            each.python,
                            folder,
                            name,
                            may_be_stopped=each.entry.may_be_stopped,
                        )
                    except ContestantBroke as error:
                        self.found.broken[ranks, name] = error.what
                        continue
                    all_open[name] = driven
                    with self._its_turn(ranks, driven, all_open):
                        about = driven.ask("open", _OPEN, ranks=ranks, variant=each.entry.variant)
                        self.found.versions[name] = about["version"]
                yield all_open
            finally:
                for driven in list(all_open.values()):
                    driven.end()

    @contextlib.contextmanager
    def _its_turn(self, ranks: int, each: Driven, all_open: dict[str, Driven]) -> Generator[None]:
        each.resume()
        try:
            yield
        except ContestantBroke as error:
            self.found.broken[ranks, each.name] = error.what
            _progress(str(error))
            all_open.pop(each.name, None)
            each.end()
        else:
            each.pause()


def _in_turn(all_open: dict[str, Driven], number: int) -> list[Driven]:
    """Return all, beginning with another one in each round."""
    each = list(all_open.values())
    shift = number % len(each) if each else 0
    return each[shift:] + each[:shift]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
