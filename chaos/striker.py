"""Does what the schedule says, to real processes.

Guarantees: a fault is written down before it is done; no signal goes to a process that merely got
the number of another; what was stopped goes on again, at the end of the run at the latest; what
never found its moment is told as missed.

Left to others: faults that a worker does, to itself or at a moment that only it sees (`witness`),
which get there with the next call or the next start; faults of the driver that are aimed at no
moment (`lives`).
"""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING

from phalanx.runtime import DevicePool, read_task
from phalanx.supervision import Phase

from .faults import FAULTS, SIGNALS, is_rank
from .full_disk import FullDisk
from .journal import now
from .orders import carry_out
from .parts import Part, parts_of
from .pending import HELPERS, Pending, is_by_worker, order_of, whose_of
from .referee_records import Missed, Struck
from .witness import claim

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .envelope import Order
    from .journal import Journal
    from .recorder import Watched
    from .schedule import Strike

_XID = 79  # "the GPU has fallen off the bus"
_ALIVE = (Phase.STARTING, Phase.SERVING, Phase.MENDING, Phase.WAITING)


class Striker:
    """The faults of one life of the driver. An `Ambush`."""

    def __init__(
        self,
        journal: Journal,
        groups: Callable[[], list[Watched]],
        call_large: Callable[[Strike], None],
        look: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._groups = groups
        self._call_large = call_large
        self._look = look  # what a worker has started is somebody else's once it is dead
        self._before = {part.pid for part in parts_of(os.getpid())}
        self._lock = threading.RLock()
        self._armed: list[Strike] = []
        self._provoked: set[int] = set()
        self._pending: list[Pending] = []
        self._starts: list[Pending] = []
        self._stopped: dict[int, tuple[Part, threading.Timer]] = {}
        self._over = False
        self._late: list[Strike] = []
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
        if rank >= size:
            self.miss(strike, f"there is no rank {rank} in a group of {size}")
            return
        ranks = tuple(range(size)) if strike.target == "group" else (rank,)
        if strike.fault == "device":
            self._spoil(strike, group)
        elif strike.fault == "disk":
            self._fill(strike, group)
        elif fault.how == "start":
            with self._lock:
                self._starts.append(Pending(strike, group, ranks))
            self._provoke(strike, group, rank)
        elif is_by_worker(strike):
            with self._lock:
                self._pending.append(Pending(strike, group, ranks))
        elif strike.point:
            with self._lock:
                self._armed.append(strike)
            self.provoke()
        else:
            self._signal(strike, group, ranks)

    def provoke(self) -> None:
        """Kill a rank of who serves, where something waits for a restart that nobody is to see."""
        for strike in list(self._armed):
            found = self._victim(strike) if strike.point == "restarting" else None
            if found is None or self._over or strike.number in self._provoked:
                continue
            if found[0].shared.view.phase is Phase.SERVING:
                self._provoked.add(strike.number)
                self._provoke(strike, *found)

    def let_go(self) -> None:
        """Have what is stopped go on; from now on nothing is ordered any more."""
        self._over = True
        self._withdraw()
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
            late, self._late = self._late, []
        for strike in missed:
            self.miss(strike, "its moment never came")
        for strike in late:
            self.miss(strike, "the run was over before a worker came to it")

    def _withdraw(self) -> None:
        """Void the orders that no worker has come to: hangs would add up long after the end."""
        with self._lock:
            for pending in [each for each in self._pending if each.out]:
                folder = pending.group.recorder.folder
                voided = [claim(folder, key) for key in pending.out]
                if all(voided):
                    self._pending.remove(pending)
                    self._late.append(pending.strike)

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
            elif is_rank(strike.target) and int(strike.target) in among:
                self._signal(strike, group, (int(strike.target),))
            else:
                self._signal(strike, group, (among[int(strike.draw * len(among))],))

    def orders(self, group: Watched, shape: str, rank: int | None) -> tuple[Order, ...]:
        """Return what workers are to do to themselves in a call of *group*."""
        if self._over or not self._pending:
            return ()
        with self._lock:
            for pending in list(self._pending):
                if pending.group is not group or pending.out:
                    continue
                whose = whose_of(pending, shape, rank)
                if not whose:
                    continue
                whom = None
                if pending.strike.target in (*HELPERS, "driver"):
                    whom = self._bystander(pending.strike, group)
                    if whom is None:
                        self._pending.remove(pending)
                        self.miss(pending.strike, f"there is no {pending.strike.target} process")
                        continue
                orders = tuple(order_of(pending.strike, each, whom) for each in whose)
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
                return (order_of(pending.strike, rank),)
        return ()

    def back(self, used: tuple[Order, ...], unused: tuple[Order, ...]) -> None:
        """Forget what was carried out; have the rest go with another call."""
        done = {order.strike for order in used}
        with self._lock:
            self._pending = [p for p in self._pending if p.strike.number not in done]
            for pending in self._pending:
                pending.out -= {order.key for order in unused}
            # The worker that has stopped somebody may be gone before it lets go.
            for order in used:
                pid = 0 if order.whom is None else order.whom[0]
                if pid in self._stopped and self._stopped[pid][1].ident is None:
                    self._stopped[pid][1].start()

    # --- doing --------------------------------------------------------------------------

    def _victim(self, strike: Strike) -> tuple[Watched, int] | None:
        """Return whom *strike* is for: a rank of a group that is alive."""
        alive = [group for group in self._groups() if group.shared.view.phase in _ALIVE]
        seats = [(group, info) for group in alive for info in group.shared.view.ranks]
        if not seats:
            return None
        if is_rank(strike.target):
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
        part = process_of(group, rank)
        if part is None:
            return  # it is being started already
        self._look()
        self.told(strike, group, rank, part.pid, lethal=True, note="killed, to be started again")
        part.send(signal.SIGKILL)

    def _signal(self, strike: Strike, group: Watched, ranks: tuple[int, ...]) -> None:
        if strike.target == "driver":
            lethal = FAULTS[strike.fault].lethal
            self.told(strike, group, pid=os.getpid(), lethal=lethal)
            carry_out(strike.fault, strike.seconds)
            return
        number = SIGNALS[strike.fault]
        if strike.target in HELPERS:
            part = self._part(strike, group)
            if part is None:
                self.miss(strike, f"there is no {strike.target} process just now")
            else:
                self._hit(strike, group, None, part, number)
            return
        victims = [(rank, process_of(group, rank)) for rank in ranks]
        if all(part is None for _, part in victims):
            self.miss(strike, f"rank {', '.join(map(str, ranks))} had no process just then")
        for rank, part in victims:
            if part is not None:
                self._hit(strike, group, rank, part, number)

    def _hit(
        self, strike: Strike, group: Watched, rank: int | None, part: Part, number: int
    ) -> None:
        self._look()
        self.told(strike, group, rank, part.pid, lethal=FAULTS[strike.fault].lethal)
        if number == signal.SIGSTOP:
            timer = self._hold(strike, part)
            part.send(number)
            timer.start()
        else:
            part.send(number)

    def _hold(self, strike: Strike, part: Part) -> threading.Timer:
        """Return what has *part* go on, once it is started; the end of the run does as well."""
        timer = threading.Timer(strike.seconds, self._go_on, (part.pid,))
        timer.daemon = True
        with self._lock:
            self._stopped[part.pid] = part, timer
        return timer

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
            self.miss(
                strike, "its devices are no fakes (phalanx.runtime.devices.fake_gpus.FakeGpus)"
            )
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

    def _bystander(self, strike: Strike, group: Watched) -> Part | None:
        """Return whom a worker is to signal, at a moment of its own, in place of itself."""
        if strike.target == "driver":
            task = read_task(os.getpid())
            return None if task is None else Part(task.pid, task.ticks, "other", "driver")
        part = self._part(strike, group)
        if part is not None and strike.fault == "stop":
            self._hold(strike, part)
        return part

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


def process_of(group: Watched, rank: int) -> Part | None:
    """Return the process of *rank*, if it has one; a child of ours that nobody has collected."""
    for info in group.shared.view.ranks:
        if info.rank == rank and info.pid is not None:
            task = read_task(info.pid)
            if task is not None and task.parent == os.getpid():
                return Part(task.pid, task.ticks, "rank", f"{group.spec.name}/{rank}")
    return None
