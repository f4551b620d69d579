"""Planted faults: mistakes put into the product, one at a time, that the checker must find.

Each is put in with `monkeypatch`, so the product knows nothing of them. Those of workers are put in
by the worker class `Planted`, in the worker itself, before it serves.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.shared_memory import FORGOTTEN
from tests.support.workers import Echo

from phalanx.actors import Executor, WorkerContext
from phalanx.actors.calls import plane, recovery
from phalanx.actors.calls.plane import CallPlane
from phalanx.actors.calls.queue import CallQueue
from phalanx.actors.calls.sender import Sender
from phalanx.actors.group.handle import Group
from phalanx.actors.group.launcher import WorkerBuilder
from phalanx.actors.group.membership import Membership
from phalanx.actors.worker_side.user_object import WorkerHost
from phalanx.chaos.instrumentation import worker_probe
from phalanx.runtime import Frame, Kind, WorkerExited
from phalanx.runtime.distributed.rendezvous import RendezvousStore
from phalanx.runtime.linux import process_tree as tree
from phalanx.runtime.memory.arena import Arena
from phalanx.runtime.process import child_process
from phalanx.runtime.worker import termination
from phalanx.runtime.worker.inbox import Inbox
from phalanx.supervision import ExitReason, GroupState, Phase
from phalanx.supervision.core import restart_rules
from phalanx.supervision.ranks import decide

Plant = Callable[[pytest.MonkeyPatch], "Callable[[], None] | None"]


@dataclass(frozen=True)
class Mistake:
    """A planted fault, and the rules that it may be found by."""

    name: str
    put: Plant
    found_by: frozenset[str]


class Planted(Echo):
    """A worker with a mistake in what it runs on."""

    def __init__(self, plant: str = "") -> None:
        super().__init__()
        self.plant = plant

    def on_start(self, ctx: WorkerContext) -> None:
        if self.plant == "order" and ctx.rank == 1:
            swap_calls()
        elif self.plant == "twice":
            run_twice()
        elif self.plant == "leaked shared memory":
            self.kept = FORGOTTEN.open("w")
        elif self.plant == "out of step":
            hold_nothing()

    def on_stop(self, reason: ExitReason) -> None:
        if self.plant == "restart before the end":
            time.sleep(0.5)  # until long after the start of its successor


TURNS = itertools.count()


def hurried(worker: Planted, turn: int = 0) -> None:
    """Answer at once or late: one rank before the other, and the other first after a restart."""
    if (worker.ctx.rank + worker.ctx.incarnation + turn) % 2:
        time.sleep(0.03)


def hurrying(executor: Executor[Any], _chance: random.Random) -> None:
    """Make calls that ranks answer unevenly, each before the other in turn; they are made again."""
    executor.collective_rpc(hurried, 30.0, (next(TURNS),), retries=99)


def working(executor: Executor[Any], _chance: random.Random) -> None:
    """Make calls that may not be made again, and are nearly always under way."""
    executor.collective_rpc(hurried, 30.0)


def in_rows(executor: Executor[Any], _chance: random.Random) -> None:
    """Have calls wait behind others, which one rank ends before the other."""
    for call in [executor.collective_rpc(hurried, 30.0, non_block=True) for _ in range(3)]:
        call.result()


# --- in the driver ------------------------------------------------------------------------


def answers_by_position(patch: pytest.MonkeyPatch) -> None:
    answer = CallPlane._answer

    def by_position(self: Any, call: Any, rank: int, given: Any) -> None:
        if getattr(given, "kind", None) == Kind.REPLY:
            rank = next((r for r in call.asked if r not in call.answers), rank)
        answer(self, call, rank, given)

    patch.setattr(CallPlane, "_answer", by_position)


def answers_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """What an incarnation answered counts for its successor as well."""
    put_back = CallQueue.put_back

    def keeping(self: Any, calls: Any) -> None:
        kept = [(call, dict(call.answers)) for call in calls]
        put_back(self, [call for call, _ in kept])
        for call, answers in kept:
            call.answers.update(answers)

    patch.setattr(CallQueue, "put_back", keeping)


class Unchecked(int):
    """The number of an incarnation that nobody compares."""

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = int.__hash__


def late_answers(patch: pytest.MonkeyPatch, *, checked: bool) -> None:
    """What a dead incarnation has answered comes once more, to its successor, as its next answer.

    A number may be in use again by then, and only that of the incarnation tells the two apart.
    """
    arrive = CallPlane._arrive
    latest: dict[tuple[int, int], tuple[int, Frame]] = {}

    def late(self: Any, slot: Any, frame: Any) -> None:
        if type(frame) is Frame and frame.kind == Kind.REPLY and frame.body:
            where = id(self), slot.rank
            incarnation, old = latest.get(where, (slot.incarnation, frame))
            copy = (frame.kind, frame.flags, frame.epoch, frame.call_id)
            latest[where] = slot.incarnation, Frame(*copy, 0, frame.extra, bytes(frame.body))
            if incarnation != slot.incarnation:
                stale = incarnation if checked else Unchecked(incarnation)
                again = (old.kind, old.flags, old.epoch, frame.call_id, stale, old.extra, old.body)
                arrive(self, slot, Frame(*again))
        arrive(self, slot, frame)

    patch.setattr(CallPlane, "_arrive", late)


def no_incarnation_check(patch: pytest.MonkeyPatch) -> None:
    late_answers(patch, checked=False)


def lost_call(patch: pytest.MonkeyPatch) -> None:
    """One call never gets to one of its ranks."""
    send = Sender._send_one
    numbers = itertools.count(1)

    def losing_one(self: Any, call: Any, payload: Any, slots: Any, *how: Any) -> None:
        if next(numbers) == 20:
            slots = tuple(slots)[1:]
        if slots:
            send(self, call, payload, slots, *how)

    patch.setattr(Sender, "_send_one", losing_one)


def retry_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What a rank had begun is not made again, whatever its caller allowed."""
    assess = recovery.assess

    def once(*words: Any) -> Any:
        loss = assess(*words)
        for call in loss.begun:
            call.retries = 0
        return loss

    patch.setattr(plane, "assess", once)


def lost_exit(patch: pytest.MonkeyPatch) -> None:
    publish = Group.publish

    def deaf(self: Any, event: Any) -> None:
        if not isinstance(event, WorkerExited) or not event.reason.is_failure:
            publish(self, event)

    patch.setattr(Group, "publish", deaf)


def retry_of_what_had_begun(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "_has_begun", lambda *_: False)


def restart_before_the_end(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    resume = decide._resume
    commit = Membership.commit_launch
    started: list[tuple[Any, Any]] = []  # each with the membership that has to release it

    def early(state: GroupState, at: float, jitter: float) -> Any:
        if state.phase is Phase.MENDING and state.mending:
            return decide._start(state)
        return resume(state, at, jitter)

    def noted(self: Any, launch: Any) -> bool:
        started.extend((self, worker) for worker in launch.workers)
        return commit(self, launch)

    patch.setattr(decide, "_resume", early)
    patch.setattr(Membership, "commit_launch", noted)

    def clear() -> None:
        """Give back what the group has forgotten: a worker, or a channel behind its successor's."""
        for membership, worker in started:
            if not worker.released:
                membership.release(worker)
            if worker.attached:
                worker.channel.close()

    return clear


def restart_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(decide, "_resume", lambda state, at, jitter: (state, ()))


def intensity_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restart_rules.RestartWindow, "admit", lambda self, now: self)


def only_the_dead_restarted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupState, "tied_to", lambda self, dead: dead)


def old_store(patch: pytest.MonkeyPatch) -> None:
    """Every epoch is sent to the meeting place of the first."""
    real = RendezvousStore.open
    first: dict[int, Any] = {}

    def stale(self: Any, epoch: int) -> Any:
        place = real(self, epoch)
        return replace(first.setdefault(id(self), place), epoch=epoch)

    patch.setattr(RendezvousStore, "open", stale)


def leaked_segment(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    kept: list[Any] = []
    close = Arena.close

    def keep(self: Any) -> None:
        kept.append(self)

    patch.setattr(Arena, "close", keep)

    def clear() -> None:
        for arena in kept:
            close(arena)

    return clear


def leaked_folder(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    made: list[str] = []
    begin = WorkerBuilder.equip

    def equip(self: Any, *words: Any) -> Any:
        made.append(tempfile.mkdtemp())
        return begin(self, *words)

    patch.setattr(WorkerBuilder, "equip", equip)

    def clear() -> None:
        for folder in made:
            Path(folder).rmdir()

    return clear


def leaked_process(patch: pytest.MonkeyPatch) -> None:
    """A worker's end is not the end of what it had started."""
    real = tree

    class Blind:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def kill(self, quarry: Any, deadline: float) -> Any:
            nobody = uuid.uuid4().hex.encode()
            return real.kill(real.TreeTarget(nobody, roots=quarry.roots), deadline)

    patch.setattr(child_process, "process_tree", Blind())


# --- in a worker --------------------------------------------------------------------------


def swap_calls() -> None:
    take = Inbox.take

    def swapped(self: Any) -> Any:
        frame = take(self)
        if frame is None or frame.kind != Kind.CALL or self.is_quiet(0):
            return frame
        other = take(self)
        if other is None or other.kind != Kind.CALL:
            self._ahead.appendleft(other)
            return frame
        self._ahead.appendleft(frame)
        return other

    Inbox.take = swapped  # type: ignore[method-assign]


def run_twice() -> None:
    invoke = WorkerHost.invoke

    def twice(self: Any, *words: Any) -> Any:
        invoke(self, *words)
        return invoke(self, *words)

    WorkerHost.invoke = twice  # type: ignore[method-assign,assignment]


def hold_nothing() -> None:
    """A rank that raised goes on at once, in what it takes for a process group."""
    for module in (termination, worker_probe):
        vars(module)["is_in_process_group"] = lambda: True
    Inbox.await_leave = lambda *_: None  # type: ignore[method-assign]


def nothing(_: pytest.MonkeyPatch) -> None: ...


def leaked_shared_memory(_: pytest.MonkeyPatch) -> Callable[[], None]:
    return FORGOTTEN.unlink


PLANTS = {
    name: Mistake(name, put, frozenset(found_by.split()))
    for name, put, found_by in (
        ("answers by position", answers_by_position, "own_reply"),
        ("no incarnation check", no_incarnation_check, "own_reply"),
        ("answers of the dead", answers_of_the_dead, "own_reply one_epoch"),
        ("lost call", lost_call, "nothing_lost"),
        ("retry forgotten", retry_forgotten, "sent_again"),
        ("lost exit", lost_exit, "deaths_known"),
        ("retry of what had begun", retry_of_what_had_begun, "at_most_once"),
        ("restart before the end", restart_before_the_end, "death_first"),
        ("restart forgotten", restart_forgotten, "heals"),
        ("intensity not counted", intensity_not_counted, "intensity"),
        ("only the dead restarted", only_the_dead_restarted, "strategy"),
        ("old store", old_store, "fresh_rendezvous"),
        ("leaked segment", leaked_segment, "nothing_left"),
        ("leaked process", leaked_process, "nothing_left"),
        ("leaked folder", leaked_folder, "nothing_left"),
        ("leaked shared memory", leaked_shared_memory, "nothing_left"),
        ("order", nothing, "one_order"),
        ("twice", nothing, "at_most_once"),
        ("out of step", nothing, "in_step"),
    )
}

TRAFFIC = {
    "answers by position": hurrying,
    "answers of the dead": hurrying,
    "retry forgotten": hurrying,
    "retry of what had begun": working,
    "out of step": in_rows,
}
"""The plants that calls of every kind would show too seldom, and the calls that show them."""
