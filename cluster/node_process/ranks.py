"""The ranks of a node: launches, ends, signals, by the machinery that a driver has on its machine.

- A launch starts all of its ranks or none; the report of their start comes before that of any end.
- The end of a rank is reported when all that came from it is gone.
- Nothing here is unpickled, and nothing waits on the caller's thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from phalanx.cluster.link.messages import Ended, NotStarted, StackText, Started, Swept
from phalanx.runtime import ExitEvidence, LaunchSpec, describe_threads
from phalanx.supervision import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.cluster.link.messages import Kill, Launch, Message, RankLaunch, Signal, Stacks
    from phalanx.runtime import Launcher, Process

_BURIAL = 10.0  # seconds for a dead rank's tree; generous: 100 ms per GiB it held
_SWEEP = 10.0
_TEXT = 8000  # characters of a text in a message, which has a limit
_LEFT = 20  # of the processes that withstood being killed, as many are named


class Ranks:
    """The ranks. Thread-safe.

    Args:
        report: Called with what is to be sent, on any thread.
    """

    def __init__(self, launcher: Launcher, report: Callable[[Message], None]) -> None:
        self._launcher = launcher
        self._report = report
        self._lock = threading.Lock()
        self._processes: dict[tuple[int, int], Process] = {}  # by rank and incarnation
        self._starting: dict[int, set[int]] = {}  # launches under way: their ranks
        self._unwanted: set[int] = set()  # those of them that are to be given up
        self._is_leaving = False

    def launch(self, order: Launch) -> None:
        """Begin to start what *order* names."""
        ranks = {rank.rank for rank in order.ranks}
        with self._lock:
            busy = {rank for rank, _ in self._processes}.union(*self._starting.values())
            if ranks & busy or self._is_leaving:
                why = "the node is leaving" if self._is_leaving else "a rank runs here already"
                self._report(NotStarted(number=order.number, error=why))
                return
            self._starting[order.number] = ranks
        _spawn(partial(self._launch, order), "launch")

    def withdraw(self, number: int) -> None:
        """Give that launch up unless it is over."""
        with self._lock:
            self._unwanted |= {number} & self._starting.keys()

    def signal(self, order: Kill | Signal) -> None:
        """Send a rank the signal, SIGKILL by default; do nothing if it has ended."""
        process = self._find(order)
        if process is not None:
            process.send_signal(getattr(order, "signal", signal.SIGKILL))

    def describe(self, order: Stacks) -> None:
        """Report where the threads of a rank are."""
        process = self._find(order)
        text = "" if process is None else describe_threads(process.pid)
        rank, incarnation = order.rank, order.incarnation
        self._report(StackText(rank=rank, incarnation=incarnation, text=text[:_TEXT]))

    def sweep(self) -> None:
        """End all ranks, and all that came from them, and report that."""
        with self._lock:
            if self._is_leaving:
                return
            self._is_leaving = True
        _spawn(self._sweep, "sweep")

    def _find(self, order: Kill | Signal | Stacks) -> Process | None:
        with self._lock:
            return self._processes.get((order.rank, order.incarnation))

    def _launch(self, order: Launch) -> None:
        is_told = threading.Event()
        by_label = {_label(rank): rank for rank in order.ranks}

        def on_exit(process: Process) -> None:
            _spawn(partial(self._bury, process, by_label[process.label], is_told), "burial")

        def is_wanted() -> bool:
            return order.number not in self._unwanted and not self._is_leaving

        try:
            processes = self._launcher.launch(
                *(_spec(rank, order) for rank in order.ranks),
                on_exit=on_exit,
                deadline=time.monotonic() + order.within,
                is_wanted=is_wanted,
            )
        except Exception as error:  # noqa: BLE001  # reported
            self._is_over(order)
            text = f"{type(error).__name__}: {error}"
            self._report(NotStarted(number=order.number, error=text[:_TEXT]))
            return
        with self._lock:
            for rank, process in zip(order.ranks, processes, strict=True):
                self._processes[rank.rank, rank.incarnation] = process
        self._is_over(order)
        pids = tuple(process.pid for process in processes)
        self._report(Started(number=order.number, pids=pids))
        is_told.set()

    def _is_over(self, order: Launch) -> None:
        with self._lock:
            self._starting.pop(order.number, None)
            self._unwanted.discard(order.number)

    def _bury(self, process: Process, rank: RankLaunch, is_told: threading.Event) -> None:
        left = process.kill_tree(time.monotonic() + _BURIAL)
        was_started = is_told.wait(_BURIAL)
        with self._lock:
            self._processes.pop((rank.rank, rank.incarnation), None)
        status = process.status or ExitEvidence()
        process.close()
        if was_started and not self._is_leaving:
            self._report(
                Ended(
                    rank=rank.rank,
                    incarnation=rank.incarnation,
                    code=status.code,
                    signal=status.signal,
                    core_dumped=status.core_dumped,
                    oom=status.oom,
                    rusage=status.rusage,
                    left=tuple(f"{one.pid} ({one.command})" for one in left[:_LEFT]),
                )
            )

    def _sweep(self) -> None:
        while True:
            try:
                self._launcher.close(time.monotonic() + _SWEEP)
            except RuntimeFault:  # it withstands being killed: then nothing is said, and it goes on
                continue
            self._report(Swept())
            return


def _spawn(act: Callable[[], None], what: str) -> None:
    threading.Thread(target=act, name=f"phalanx-{what}", daemon=True).start()


def _label(rank: RankLaunch) -> str:
    return f"{rank.label}#{rank.incarnation}"


def _spec(rank: RankLaunch, order: Launch) -> LaunchSpec:
    return LaunchSpec(
        entry=rank.entry,
        payload=rank.payload,
        label=_label(rank),
        title=rank.title,
        env={**os.environ, **rank.env},
        method="zygote" if rank.is_forked else "exec",
        preload=order.preload,
    )
