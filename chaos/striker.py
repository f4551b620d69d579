"""Does what the schedule says, to real processes.

Guarantees: a fault is written down before it is done; no signal goes to a process that merely got
the number of another; what was stopped goes on again, at the end of the run at the latest; what
never found its moment is told as missed.

Left to others: faults that a worker does to itself (`witness`), which get there with the next call
or the next start; faults of the driver (`lives`).
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import DevicePool, read_task
from phalanx.supervision import Phase

from .envelope import Order
from .faults import FAULTS
from .full_disk import FullDisk
from .journal import now
from .parts import Part, parts_of
from .records import Missed, Struck

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .journal import Journal
    from .recorder import Watched
    from .schedule import Strike

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_XID = 79  # "the GPU has fallen off the bus"
_IN_WORKERS = ("running", "after_reply")
_ALIVE = (Phase.STARTING, Phase.SERVING, Phase.MENDING, Phase.WAITING)


@dataclass(slots=True)
class Pending:
    """A strike that waits for a worker to do it to itself."""

    strike: Strike
    group: Watched
    ranks: tuple[int, ...]
    out: set[str] = field(default_factory=set[str])  # the keys of orders under way


class Striker:
    """The faults of one life of the driver. An `Ambush`.

    Attributes:
        done: The numbers of the strikes that the driver did.
    """

    def __init__(
        self,
        journal: Journal,
        groups: Callable[[], list[Watched]],
        call_large: Callable[[Strike], None],
    ) -> None:
        self._journal = journal
        self._groups = groups
        self._call_large = call_large
        self._before = {part.pid for part in parts_of(os.getpid())}
        self._lock = threading.RLock()
        self._armed: list[Strike] = []
        self._pending: list[Pending] = []
        self._starts: list[Pending] = []
        self._stopped: dict[int, tuple[Part, threading.Timer]] = {}
        self._over = False
        self._spoilt: dict[int, tuple[Callable[[], None], threading.Timer]] = {}

    # --- the schedule -------------------------------------------------------------------

    def strike(self, strike: Strike) -> None:
        """Do *strike*, or lay it in ambush."""
        fault = FAULTS[strike.fault]
        if strike.fault == "large":
            self._call_large(strike)
            return
        found = self._victim(strike)
        if found is None:
            self.miss(strike, "no group was alive")
            return
        group, rank = found
        size = len(group.shared.view.ranks)
        ranks = tuple(range(size)) if strike.target == "group" else (rank,)
        if strike.fault == "device":
            self._spoil(strike, group)
        elif strike.fault == "disk":
            self._fill(strike, group)
        elif fault.how == "start":
            with self._lock:
                self._starts.append(Pending(strike, group, ranks))
            self._provoke(strike, group, rank)
        elif fault.how == "inside" or strike.point in _IN_WORKERS:
            with self._lock:
                self._pending.append(Pending(strike, group, ranks))
        elif strike.point:
            with self._lock:
                self._armed.append(strike)
            if strike.point == "restarting" and group.shared.view.phase is Phase.SERVING:
                self._provoke(strike, group, rank)
        else:
            self._signal(strike, group, ranks)

    def let_go(self) -> None:
        """Have what is stopped go on; from now on nothing is ordered any more."""
        self._over = True
        for pid in list(self._stopped):
            self._go_on(pid)
        for number in list(self._spoilt):
            self._heal(number)

    def finish(self) -> None:
        """Let go what is stopped, and tell what was missed."""
        self.let_go()
        with self._lock:
            missed = [*self._armed, *(p.strike for p in (*self._pending, *self._starts))]
            self._armed, self._pending, self._starts = [], [], []
        for strike in missed:
            self.miss(strike, "its moment never came")

    # --- the points ---------------------------------------------------------------------

    def reached(self, point: str, group: Watched, ranks: tuple[tuple[int, int], ...]) -> None:
        """Do what was laid in ambush here."""
        if not self._armed or (self._over and point != "closing"):
            return
        with self._lock:
            here = [strike for strike in self._armed if strike.point == point]
            if point != "closing":  # the end comes once, and takes all of them
                here = here[:1]
            for strike in here:
                self._armed.remove(strike)
        among = [rank for rank, _ in ranks]
        for strike in here:
            if strike.target == "group" or not among:
                self._signal(strike, group, tuple(among))
            elif strike.target.isdigit() and int(strike.target) in among:
                self._signal(strike, group, (int(strike.target),))
            else:
                self._signal(strike, group, (among[int(strike.draw * len(among))],))

    def orders(self, group: Watched, shape: str, rank: int | None) -> tuple[Order, ...]:
        """Return what workers are to do to themselves in a call of *group*."""
        if self._over or not self._pending:
            return ()
        with self._lock:
            for pending in self._pending:
                if pending.group is not group or pending.out:
                    continue
                whose = _whose(pending, shape, rank)
                if whose:
                    orders = tuple(_order(pending.strike, each) for each in whose)
                    pending.out = {order.key for order in orders}
                    return orders
        return ()

    def start_orders(self, group: Watched, rank: int) -> tuple[Order, ...]:
        """Return what is to go wrong in a start of *rank*."""
        if self._over or not self._starts:
            return ()
        with self._lock:
            found = [p for p in self._starts if p.group is group and rank in p.ranks]
            for pending in found[:1]:
                self._starts.remove(pending)
                return (_order(pending.strike, rank),)
        return ()

    def back(self, used: tuple[Order, ...], unused: tuple[Order, ...]) -> None:
        """Forget what was carried out; have the rest go with another call."""
        done = {order.strike for order in used}
        with self._lock:
            self._pending = [p for p in self._pending if p.strike.number not in done]
            for pending in self._pending:
                pending.out -= {order.key for order in unused}

    # --- doing --------------------------------------------------------------------------

    def _victim(self, strike: Strike) -> tuple[Watched, int] | None:
        """Return whom *strike* is for: a rank of a group that is alive."""
        alive = [group for group in self._groups() if group.shared.view.phase in _ALIVE]
        seats = [(group, info) for group in alive for info in group.shared.view.ranks]
        if not seats:
            return None
        if strike.target.isdigit():
            group = alive[-1]
            return group, strike.rank(len(group.shared.view.ranks))
        first = int(strike.draw * len(seats))
        # One that has a process, if there is one.
        for group, info in (*seats[first:], *seats[:first]):
            if info.pid is not None:
                return group, info.rank
        group, info = seats[first]
        return group, info.rank

    def _provoke(self, strike: Strike, group: Watched, rank: int) -> None:
        part = _process_of(group, rank)
        if part is None:
            return  # it is being started already
        self.told(strike, group, rank, part.pid, lethal=True, note="killed, to be started again")
        part.send(signal.SIGKILL)

    def _signal(self, strike: Strike, group: Watched, ranks: tuple[int, ...]) -> None:
        number = _SIGNALS[strike.fault]
        if strike.target in ("standby", "zygote", "store", "logs"):
            part = self._part(strike, group)
            if part is None:
                self.miss(strike, f"there is no {strike.target} process just now")
            else:
                self._hit(strike, group, None, part, number)
            return
        victims = [(rank, _process_of(group, rank)) for rank in ranks]
        if all(part is None for _, part in victims):
            self.miss(strike, f"rank {', '.join(map(str, ranks))} had no process just then")
        for rank, part in victims:
            if part is not None:
                self._hit(strike, group, rank, part, number)

    def _hit(
        self, strike: Strike, group: Watched, rank: int | None, part: Part, number: int
    ) -> None:
        self.told(strike, group, rank, part.pid, lethal=FAULTS[strike.fault].lethal)
        if number == signal.SIGSTOP:
            timer = threading.Timer(strike.seconds, self._go_on, (part.pid,))
            timer.daemon = True
            with self._lock:
                self._stopped[part.pid] = part, timer
            part.send(number)
            timer.start()
        else:
            part.send(number)

    def _go_on(self, pid: int) -> None:
        with self._lock:
            part, timer = self._stopped.pop(pid, (None, None))
        if part is not None:
            part.send(signal.SIGCONT)
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()

    def _spoil(self, strike: Strike, group: Watched) -> None:
        """Have a device of *group*'s pool report an error, if its inventory is a fake one."""
        pool = group.spec.devices
        inventory = pool.inventory if isinstance(pool, DevicePool) else None
        report: Callable[..., None] | None = getattr(inventory, "report_xid", None)
        heal: Callable[[str], None] | None = getattr(inventory, "heal", None)
        if not isinstance(pool, DevicePool) or report is None or heal is None:
            self.miss(strike, "its devices are no fakes (phalanx.runtime.testing.FakeGpus)")
            return
        devices = [status.device for status in pool.status()]
        device = devices[int(strike.draw * len(devices))]
        self.told(strike, group, note=f"Xid {_XID} on {device}")
        report(device, _XID, fatal=True)
        pool.look()  # now, not when its groups look next: it may be well again by then
        self._heal_later(strike, partial(heal, device))

    def _fill(self, strike: Strike, group: Watched) -> None:
        """Have no room for *group*'s snapshots, where they are kept in a folder."""
        folder: Path | None = getattr(group.spec, "snapshots", None)
        if folder is None:
            self.miss(strike, "its snapshots are kept in no folder (checkpoint.where)")
            return
        disk = FullDisk(folder)
        refusal = disk.refusal()
        if refusal:
            self.miss(strike, refusal)
            return
        self.told(strike, group, note=f"the disk of {folder}")
        disk.fill()
        self._heal_later(strike, disk.free)

    def _heal_later(self, strike: Strike, heal: Callable[[], None]) -> None:
        timer = threading.Timer(strike.seconds, self._heal, (strike.number,))
        timer.daemon = True
        with self._lock:
            self._spoilt[strike.number] = heal, timer
        timer.start()

    def _heal(self, number: int) -> None:
        with self._lock:
            heal, timer = self._spoilt.pop(number, (None, None))
        if heal is not None:
            heal()
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()

    def _part(self, strike: Strike, group: Watched) -> Part | None:
        every = [part for part in parts_of(os.getpid()) if part.role == strike.target]
        if strike.target in ("standby", "store"):
            every = [part for part in every if part.label.startswith(f"{group.spec.name}/")]
        # A runtime that was there before the run is not the first choice.
        found = [part for part in every if part.pid not in self._before] or every
        return found[int(strike.draw * len(found))] if found else None

    def told(
        self,
        strike: Strike,
        group: Watched,
        rank: int | None = None,
        pid: int | None = None,
        *,
        lethal: bool = False,
        note: str = "",
    ) -> None:
        """Write down that *strike* is being done."""
        incarnation = None
        for info in group.shared.view.ranks:
            if info.rank == rank:
                incarnation = info.incarnation
        self._journal.write(
            Struck(
                at=now(),
                strike=strike.number,
                fault=strike.fault,
                target=strike.target,
                point=strike.point,
                group=group.name,
                rank=rank,
                incarnation=incarnation,
                pid=pid,
                lethal=lethal,
                note=note,
            )
        )

    def miss(self, strike: Strike, why: str) -> None:
        """Tell that *strike* found nobody."""
        missed = Missed(
            at=now(), strike=strike.number, fault=strike.fault, target=strike.target, why=why
        )
        self._journal.write(missed)


def _whose(pending: Pending, shape: str, rank: int | None) -> tuple[int, ...]:
    """Return the ranks that a call of *shape* takes the order to."""
    if shape == "pool":
        return (-1,) if pending.strike.target == "random" else ()
    if shape == "single":
        return (rank,) if rank is not None and pending.ranks == (rank,) else ()
    return pending.ranks


def _order(strike: Strike, rank: int) -> Order:
    return Order(
        strike=strike.number,
        key=f"{strike.number}-{rank}",
        fault=strike.fault,
        target=strike.target,
        rank=rank,
        at=strike.point if strike.point in _IN_WORKERS else "running",
        aimed=bool(strike.point),
        seconds=strike.seconds,
    )


def _process_of(group: Watched, rank: int) -> Part | None:
    """Return the process of *rank*, if it has one; a child of ours that nobody has collected."""
    for info in group.shared.view.ranks:
        if info.rank == rank and info.pid is not None:
            task = read_task(info.pid)
            if task is not None and task.parent == os.getpid():
                return Part(task.pid, task.ticks, "rank", f"{group.spec.name}/{rank}")
    return None
