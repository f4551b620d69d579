"""The ranks of a node: launches, exits and signals, with the same parts as a local driver.

- A launch starts all of its ranks or none; the report of their start comes before that of any exit.
  A launch of ranks that were killed, or withdrawn, begins when nothing of those is left.
- The exit of a rank is reported when all its descendants have ended.
- One relay beside the ranks carries their calls. It reports their exits to the gateway,
  and ends with its link.
- Nothing here is unpickled, and nothing waits on the caller's thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from phalanx.cluster.link.messages import Ended, NotStarted, StackText, Started, Stopped, Swept
from phalanx.runtime import (
    RELAY_PRELOAD,
    STACKS,
    ExitEvidence,
    Invitation,
    LaunchSpec,
    WorkerRelay,
    create_lock_file,
    describe_threads,
    usable_processors,
)
from phalanx.supervision import RuntimeFault

from .devices import NodeDevices
from .output import RankOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from phalanx.cluster.link.messages import (
        Kill,
        Launch,
        Message,
        RankLaunch,
        Signal,
        Stacks,
    )
    from phalanx.runtime import Launcher, Lease, Process, RelaySlot

    from .output import OutputWindow

_REAP_TIMEOUT = 10.0  # seconds for the process tree of an exited rank: 100 ms per GiB it held
_SWEEP = 10.0
_TEXT = 8000  # characters of a text in a message, which has a limit
_LAST = 24_000  # bytes of each of a dead rank's texts in a message
_CHECK = 5.0  # seconds between two looks at the devices; arbitrary
_AGAIN = 0.1  # seconds until a thread may be had, if the limit of threads is reached


class Ranks:
    """The ranks. Thread-safe.

    Args:
        report: Called with what is to be sent, on any thread.
        interface: Returns the name of the network interface towards the driver.
        window: Of what they write.
    """

    def __init__(
        self,
        launcher: Launcher,
        report: Callable[[Message], None],
        interface: Callable[[], str],
        window: OutputWindow,
    ) -> None:
        self._launcher = launcher
        self._window = window
        self._report = report
        self._interface = interface
        self._locks = -1
        self._devices = NodeDevices()
        self._relay = WorkerRelay(launcher, "relay")
        self._looked_at = 0.0  # the devices, on the monotonic clock
        self._broken: dict[tuple[int, int], str] = {}
        self._equipment: dict[tuple[int, int], _Equipment] = {}
        self._stopped: tuple[int, ...] = ()
        self._lock = threading.Condition()
        self._processes: dict[tuple[int, int], Process] = {}  # by rank and incarnation
        self._starting: dict[int, set[int]] = {}  # launches under way: their ranks
        self._unwanted: set[int] = set()  # those of them that are to be given up
        self._killed: set[tuple[int, int]] = set()  # those of the processes that are to end
        self._is_leaving = False

    def warm(self, preload: Sequence[str], env: Mapping[str, str]) -> None:
        """Begin to start the processes that ranks, and those beside them, are forked from."""

        def warm() -> None:
            with contextlib.suppress(RuntimeFault, OSError):  # a launch reports it
                self._launcher.warm(preload, env)
                self._launcher.warm(RELAY_PRELOAD)

        self._spawn(warm, "warm")

    def launch(self, order: Launch) -> None:
        """Begin to start what *order* names."""
        ranks = {rank.rank for rank in order.ranks}
        with self._lock:
            wanted = [self._starting[number] for number in self._starting.keys() - self._unwanted]
            busy = {rank for rank, _ in self._processes.keys() - self._killed}.union(*wanted)
            if ranks & busy or self._is_leaving:
                why = "the node is leaving" if self._is_leaving else "a rank runs here already"
                self._report(NotStarted(number=order.number, error=why))
                return
            self._starting[order.number] = ranks
        self._spawn(partial(self._launch, order), "launch")

    def withdraw(self, number: int) -> None:
        """Give that launch up unless it is over."""
        with self._lock:
            if number in self._starting:
                self._unwanted.add(number)
                self._lock.notify_all()
                return
        self._report(NotStarted(number=number, error="it was withdrawn"))  # and is not to come

    def signal(self, order: Kill | Signal) -> None:
        """Send a rank the signal, SIGKILL by default; do nothing if it has ended."""
        process = self._find(order)
        number = getattr(order, "signal", signal.SIGKILL)
        if process is None:
            return
        who = order.rank, order.incarnation
        with self._lock:  # its output may be closed once this is free
            if number == signal.SIGKILL:
                self._killed.add(who)
            if number == STACKS and (known := self._equipment.get(who)):
                known.words_end = os.fstat(known.output.faults).st_size
        process.send_signal(number)

    def describe(self, order: Stacks) -> None:
        """Report where the threads of a rank are."""
        process = self._find(order)
        text = "" if process is None else describe_threads(process.pid)
        rank, incarnation = order.rank, order.incarnation
        self._report(StackText(rank=rank, incarnation=incarnation, text=text[:_TEXT]))

    def look(self) -> None:
        """Report which ranks are stopped, at each look as long as one is.

        Once would not do: the driver may not know the latest incarnation of a rank yet.
        """
        with self._lock:
            processes = dict(self._processes)
        stopped = tuple(sorted(rank for (rank, _), p in processes.items() if p.is_stopped()))
        if stopped or self._stopped:
            self._stopped = stopped
            self._report(Stopped(ranks=stopped))
        if processes and (now := time.monotonic()) - self._looked_at >= _CHECK:
            self._looked_at = now
            self._spawn(self._look_at_devices, "devices")

    def sweep(self) -> None:
        """End all ranks, and all that came from them, and report that."""
        with self._lock:
            if self._is_leaving:
                return
            self._is_leaving = True
            self._lock.notify_all()
        self._spawn(self._sweep, "sweep")

    def _look_at_devices(self) -> None:
        """Kill the ranks whose devices cannot go on."""
        for who, why in self._devices.look().items():
            with self._lock:
                process = self._processes.get(who)
                if process is not None:
                    self._broken.setdefault(who, why)
            if process is not None:
                process.send_signal(signal.SIGKILL)

    def _find(self, order: Kill | Signal | Stacks) -> Process | None:
        with self._lock:
            return self._processes.get((order.rank, order.incarnation))

    def _launch(self, order: Launch) -> None:
        start_reported = threading.Event()
        by_label = {_label(rank): rank for rank in order.ranks}

        def on_exit(process: Process) -> None:
            rank = by_label[process.label]
            self._spawn(partial(self._reap, process, rank, start_reported), "reap")

        def is_wanted() -> bool:
            return order.number not in self._unwanted and not self._is_leaving

        def is_free() -> bool:
            others = [its for number, its in self._starting.items() if number != order.number]
            there = {rank for rank, _ in self._processes}.union(*others)
            return not there & self._starting[order.number] or not is_wanted()

        deadline = time.monotonic() + order.within
        with self._lock:
            self._lock.wait_for(is_free, order.within)
        equipped: list[_Equipment] = []
        try:
            leases = self._devices.lease(order.ranks, deadline, is_wanted)
            self._equip(order, equipped, deadline, is_wanted)
            specs = [
                self._spec(rank, order, leases.get(rank.rank), known)
                for rank, known in zip_longest(order.ranks, equipped)
            ]
            processes = self._launcher.launch(
                *specs, on_exit=on_exit, deadline=deadline, is_wanted=is_wanted
            )
        except Exception as error:  # noqa: BLE001  # reported
            for each in equipped:
                each.close()
            for rank in order.ranks:
                self._devices.give_back(rank.rank, rank.incarnation, None)
            self._is_over(order)  # not before: the next launch of these ranks needs their devices
            text = f"{type(error).__name__}: {error}"
            self._report(NotStarted(number=order.number, error=text[:_TEXT]))
            return
        with self._lock:
            for rank, process in zip(order.ranks, processes, strict=True):
                self._processes[rank.rank, rank.incarnation] = process
            for each in equipped:
                self._equipment[each.key] = each
        for each in equipped:
            each.close_child_ends()
        pids = tuple(process.pid for process in processes)
        devices = tuple(str(leases[r.rank]) if r.rank in leases else "cpu" for r in order.ranks)
        self._report(Started(number=order.number, pids=pids, devices=devices))
        self._is_over(order)  # not before: a withdrawal is then answered, as of what is not to come
        for each in equipped:
            each.output.begin()
        start_reported.set()

    def _is_over(self, order: Launch) -> None:
        with self._lock:
            self._starting.pop(order.number, None)
            self._unwanted.discard(order.number)
            self._lock.notify_all()

    def _reap(self, process: Process, rank: RankLaunch, start_reported: threading.Event) -> None:
        process.kill_tree(time.monotonic() + _REAP_TIMEOUT)
        was_started = start_reported.wait(_REAP_TIMEOUT)
        self._devices.give_back(rank.rank, rank.incarnation, process.pid)  # to the next launch
        with self._lock:
            self._processes.pop((rank.rank, rank.incarnation), None)
            self._killed.discard((rank.rank, rank.incarnation))
            self._lock.notify_all()
            equipment = self._equipment.pop((rank.rank, rank.incarnation), None)
            broken = self._broken.pop((rank.rank, rank.incarnation), "")
        status = process.status or ExitEvidence()
        process.close()
        last_words = stacks = ""
        if equipment is not None:
            last_words, stacks = equipment.output.last_words(equipment.words_end)
            if was_started and not self._is_leaving:
                equipment.output.finish()
            equipment.close()
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
                    broken=broken,
                    last_words=_fitting(last_words),
                    stacks=_fitting(stacks),
                )
            )

    def _spec(
        self,
        rank: RankLaunch,
        order: Launch,
        lease: Lease | None,
        known: _Equipment | None,
    ) -> LaunchSpec:
        """Return how *rank* is started."""
        fds: dict[str, int] = {}
        stdout = stderr = None
        if known is not None:
            fds = {"locks": self._locks, **known.slot.worker_fds(), **known.output.child_fds()}
            stdout, stderr = known.output.stdout, known.output.stderr
        visible = dict[str, str]() if lease is None else lease.environment
        size = int(rank.env.get("LOCAL_WORLD_SIZE", len(order.ranks)))
        share = max(1, int(usable_processors() // size))
        defaults = {"OMP_NUM_THREADS": str(share)}
        if interface := self._interface():
            defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
        return LaunchSpec(
            entry=rank.entry,
            payload=rank.payload,
            fds=fds,
            label=_label(rank),
            title=rank.title,
            env={**defaults, **os.environ, **visible, **rank.env},
            stdout=stdout,
            stderr=stderr,
            method="zygote" if rank.is_forked else "exec",
            preload=order.preload,
            asked_env=rank.env,
        )

    def _equip(
        self,
        order: Launch,
        equipped: list[_Equipment],
        deadline: float,
        is_wanted: Callable[[], bool],
    ) -> None:
        """Add what each rank of *order* that is sent calls is given to *equipped*."""
        if order.link is None:
            return
        with self._lock:
            if self._locks < 0:
                self._locks = create_lock_file()
        invitation = Invitation(**vars(order.link))
        numbers = [(rank.seat, rank.epoch) for rank in order.ranks]
        slots = self._relay.open_slots(invitation, numbers, deadline=deadline, is_wanted=is_wanted)
        with contextlib.ExitStack() as made:
            for slot in slots:
                made.callback(slot.close)
            for rank, slot in zip(order.ranks, slots, strict=True):
                loop = self._launcher.loop
                who = (rank.rank, rank.incarnation)
                output = RankOutput(loop, *who, self._report, self._window)
                equipped.append(_Equipment(who, slot, output))
            made.pop_all()

    def _sweep(self) -> None:
        while True:
            try:
                self._launcher.close(time.monotonic() + _SWEEP)
            except RuntimeFault:  # it withstands being killed: then nothing is said, and it goes on
                continue
            self._report(Swept())
            return

    def _spawn(self, act: Callable[[], None], what: str) -> None:
        """Run *act* on a new thread; if none can be started, a little later."""
        try:
            threading.Thread(target=act, name=f"phalanx-{what}", daemon=True).start()
        except RuntimeError:  # the limit of threads is reached
            again = partial(self._spawn, act, what)
            self._launcher.loop.call_at(time.monotonic() + _AGAIN, again)


def _label(rank: RankLaunch) -> str:
    return f"{rank.label}#{rank.incarnation}"


def _fitting(text: str) -> str:
    """Return the end of *text* that takes no more than so many bytes in a message."""
    text = text[-_LAST:]
    while len(json.dumps(text)) > _LAST:
        text = text[len(text) // 4 + 1 :]
    return text


@dataclass(slots=True)
class _Equipment:
    """The resources of one incarnation of a rank on its node.

    Attributes:
        key: Rank and incarnation.
        words_end: Where its stacks begin, behind its last words; None without a request.
    """

    key: tuple[int, int]
    slot: RelaySlot
    output: RankOutput
    words_end: int | None = None

    def close_child_ends(self) -> None:
        """Release resources that only its processes use; they run by now."""
        self.slot.close()
        self.output.close_child_ends()

    def close(self) -> None:
        """Give it back."""
        self.close_child_ends()
        self.output.close()
