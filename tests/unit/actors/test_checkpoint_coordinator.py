"""What is store of the ranks' states, call by call, without any process."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.actors.calls.call import Call, Shape, options_of
from phalanx.actors.checkpoint.coordinator import CheckpointCoordinator
from phalanx.actors.checkpoint.group_checkpoints import CheckpointManager
from phalanx.actors.checkpoint.snapshot_store import Snapshot, SnapshotStore
from phalanx.actors.spec.checkpoint_policy import CheckpointPolicy
from phalanx.runtime import (
    Flag,
    Frame,
    Kind,
    LargeFrame,
    RemoteFailure,
    Stamp,
    encode,
    store_snapshot,
)
from phalanx.runtime.checkpoint.snapshot import SnapshotName
from phalanx.supervision import RuntimeFault, SpecError

BOTH = (0, 1)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Noted:
    """An observer that keeps the names of what it is told, and of the snapshots."""

    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def due(self) -> None:
        self._told.append("due")

    def failed(self, rank: int, number: int, failure: RemoteFailure) -> None:
        self._told.append(("failed", rank, number, failure))

    def changed(self, kept: Snapshot | None) -> None:
        self._told.append(("changed", kept))


def call(wire: int) -> Call:
    made = Call(wire, "add", Shape.COLLECTIVE, [], options_of(now=0.0, timeout=None))
    made.wire = wire
    return made


def saved(wire: int, value: object = None) -> Frame:
    payload = store_snapshot(encode(value, "it"), Stamp(wire, 0, 2, 1, 0.0), None)
    assert payload.file is not None
    frame = LargeFrame(Kind.SAVED, Flag.FILE, 1, wire, 1, 0, payload.tail)
    frame.fds, frame.lender = [payload.file], None
    return frame


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def coordinator(told: list[Any]) -> Iterator[CheckpointCoordinator]:
    with opened(CheckpointPolicy(every_calls=1), told) as coordinator:
        yield coordinator


@contextlib.contextmanager
def opened(
    policy: CheckpointPolicy, told: list[Any], loop: object = None
) -> Generator[CheckpointCoordinator]:
    coordinator = CheckpointCoordinator(policy, together=True)
    coordinator.open(cast("Any", loop), cast("Any", Noted(told)), can_reshard=False, size=2)
    try:
        yield coordinator
    finally:
        coordinator.close(forget=True)


class Clock:
    """The clock and the timers of an event loop."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, act: Callable[[], None]) -> Clock:
        self.timers.append((at, act))
        return self

    def cancel(self) -> None:
        pass


def take(coordinator: CheckpointCoordinator, wire: int) -> None:
    assert coordinator.mark(call(wire), BOTH, 2)
    for rank in BOTH:
        coordinator.on_frame(rank, saved(wire))
        coordinator.answered(rank, wire)


def latest(coordinator: CheckpointCoordinator) -> int:
    found = coordinator.store.latest()
    return 0 if found is None else found.number


def test_a_call_that_reached_some_ranks_only_leaves_nothing_open(
    coordinator: CheckpointCoordinator,
) -> None:
    coordinator.mark(call(1), BOTH, 2)
    coordinator.on_frame(0, saved(1))

    coordinator.abandon(1)

    assert not coordinator._open
    coordinator.answered(0, 1)
    assert latest(coordinator) == 0


def test_descriptors_are_bounded_also_while_nobody_prunes(
    coordinator: CheckpointCoordinator,
) -> None:
    before = descriptors()
    for wire in range(1, 400):
        take(coordinator, wire)

    assert descriptors() - before < 150
    coordinator.prune()
    assert descriptors() - before == 4
    assert latest(coordinator) == 399


@pytest.mark.parametrize("everybody", [True, False])
def test_a_loss_voids_what_is_not_answered_by_all(
    coordinator: CheckpointCoordinator, everybody: bool
) -> None:
    take(coordinator, 1)
    coordinator.mark(call(2), BOTH, 2)
    for rank in BOTH:
        coordinator.on_frame(rank, saved(2))
    coordinator.answered(0, 2)

    coordinator.lose([0, 1] if everybody else [1], everybody=everybody)
    coordinator.answered(1, 2)

    assert latest(coordinator) == 1
    assert coordinator.is_unsaved() is not everybody
    assert coordinator.mark(call(3), BOTH, 2) == BOTH


def test_the_time_counts_from_the_first_call_that_is_in_no_snapshot(told: list[Any]) -> None:
    clock = Clock()
    with opened(CheckpointPolicy(every_seconds=5.0), told, clock) as coordinator:
        coordinator.mark(call(1), BOTH, 2)
        clock.now = 103.0
        coordinator.mark(call(2), BOTH, 2)
        ((at, due),) = clock.timers
        due()
        assert (at, told) == (105.0, ["due"])

        taken = call(3)
        taken.snapshots = []
        coordinator.mark(taken, BOTH, 2)
        clock.now = 110.0
        assert len(clock.timers) == 1  # nothing happens while nothing is called
        coordinator.mark(call(4), BOTH, 2)
        assert clock.timers[1][0] == 115.0


def test_a_state_that_was_lost_on_its_way_is_said_to_be(
    coordinator: CheckpointCoordinator, told: list[Any]
) -> None:
    made = call(1)
    made.snapshots = []
    coordinator.mark(made, BOTH, 2)
    whole = saved(1)
    lost = LargeFrame(Kind.SAVED, Flag.FILE | Flag.LOST, 1, 1, 1, 0, whole.body)
    for rank, frame in zip(BOTH, (whole, lost), strict=True):
        coordinator.on_frame(rank, frame)
        coordinator.answered(rank, 1)

    ((*what, failure),) = [each for each in told if each[0] == "failed"]
    assert what == ["failed", 1, 1]
    assert "no descriptor free" in failure.message
    with pytest.raises(RuntimeFault, match="no descriptor free"):
        coordinator.outcome(made)


def test_a_state_for_which_memory_is_short_is_not_taken_for_damaged(
    coordinator: CheckpointCoordinator,
) -> None:
    take(coordinator, 1)
    rejected: list[tuple[int, str]] = []

    def choose() -> set[int]:
        points = coordinator.store.choose(range(3), 3, lambda *why: rejected.append(why))
        for point in points.values():
            point.close()
        return set(points)

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
    try:
        with pytest.raises(RuntimeFault, match="no memory to give back snapshot 1"):
            choose()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    assert choose() == {0, 1, 2}
    assert rejected == []


def test_a_folder_without_a_complete_snapshot_is_refused_each_time(tmp_path: Path) -> None:
    (tmp_path / str(SnapshotName(number=7, rank=0, world_size=2))).write_bytes(b"half of it")
    policy = CheckpointPolicy(where=tmp_path, resume=True)
    store = SnapshotStore(policy, together=True, sealed=False)

    for _ in range(2):  # as a supervisor does, which starts it again
        with pytest.raises(SpecError, match="none is complete"):
            store.open(2, can_reshard=False)

    assert not store.is_held


def test_what_a_killed_writer_has_left_is_removed_after_its_death(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    store = SnapshotStore(CheckpointPolicy(where=tmp_path), together=True, sealed=False)
    store.open(2, can_reshard=False)
    for number in (5, 6):
        (tmp_path / f".{SnapshotName(number, 0, 2)}.99").write_bytes(b"half of it")

    store.prune(lambda: {6}, everything=True)

    assert [path.name for path in tmp_path.iterdir()] == [f".{SnapshotName(6, 0, 2)}.99"]
    store.close()


def test_failures_that_each_have_a_text_of_their_own_are_logged_once_for_each_rank() -> None:
    logged: list[Any] = []
    told: list[Any] = []
    group: Any = SimpleNamespace(
        checkpoints=None,
        spec=SimpleNamespace(name="tp"),
        clock=lambda: 0.0,
        post=lambda call, *args: call(*args),
        publish=logged.append,
        deliver=told.append,
    )
    manager = CheckpointManager(group)

    for number in range(10):
        for rank in BOTH:
            manager.failed(rank, number, RemoteFailure.of(OSError(f"no room for {number}")))

    assert [(each.rank, each.number) for each in logged] == [(0, 0), (1, 0)]
    assert len(told) == 18
