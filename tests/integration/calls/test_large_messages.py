"""Large messages, both ways, through real workers, also while ranks are being killed."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.options import Make
from tests.support.processes import start_thread, wait_until
from tests.support.rank_faults import kill, wait_healed
from tests.support.transport import TRANSPORT
from tests.support.workers import Echo, Late

from phalanx.actors import Executor, Launch, WorkerActor
from phalanx.runtime.memory.arena import SLOTS
from phalanx.supervision import (
    Intensity,
    MessageTooLarge,
    RemoteError,
    RuntimeFault,
    Strategy,
    WorkerDied,
)

MIB = 1 << 20
WAIT = 30.0


class Keeper(WorkerActor):
    """Reads, writes, keeps and makes large things."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def total(self, array: Any) -> int:
        return int(array.sum(dtype=np.int64))

    def keep(self, array: Any) -> None:
        self.kept.append(array)

    def totals_kept(self) -> list[int]:
        return [self.total(array) for array in self.kept]

    def add(self, array: Any, what: int) -> int:
        array += what
        return self.total(array)

    def made(self, size: int, value: int) -> Any:
        return np.full(size, value + self.ctx.rank, dtype=np.uint8)

    def echo(self, value: Any) -> Any:
        return value

    def fail(self, size: int, *, later: bool) -> Any:
        error = ValueError(bytes(size))
        if later:
            return Late(error)
        raise error


def full(value: int, size: int = MIB) -> Any:
    return np.full(size, value, dtype=np.uint8)


def shared_bytes() -> int:
    """Memory behind every arena that the driver knows, as the kernel counts it."""
    sizes: dict[int, int] = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if "phalanx-arena" in str(fd.readlink()):
                found = fd.stat()
                sizes[found.st_ino] = found.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(sizes.values())


def test_writing_in_place_changes_nobody_elses_data_nor_the_next_message(make: Make) -> None:
    executor = make(Keeper, 3)

    for value in range(10):
        sent = full(value)
        each = executor.scatter("add", args=[(sent, 1), (sent, 2), (sent, 3)], timeout=WAIT)
        assert each == [(value + add) * MIB for add in (1, 2, 3)]
        assert executor.collective_rpc("add", WAIT, args=(sent, 5)) == [(value + 5) * MIB] * 3
        assert executor.collective_rpc("total", WAIT, args=(sent,)) == [value * MIB] * 3
        assert int(sent[0]) == value


def test_more_than_the_arena_has_places_for_is_kept_as_it_was_and_blocks_nobody(
    make: Make,
) -> None:
    executor = make(Keeper, 2)
    size = 256 * 1024

    for value in range(300):
        executor.call("keep", WAIT, args=(full(value % 200, size),), rank=0)
        if value % 20 == 0:
            assert executor.collective_rpc("total", WAIT, args=(full(99),)) == [99 * MIB] * 2

    expected = [value % 200 * size for value in range(300)]
    assert executor.call("totals_kept", WAIT, rank=0) == expected


def descriptors(_: object) -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_a_rank_keeps_takes_a_quarter_of_its_descriptors_at_most(make: Make) -> None:
    executor = make(Keeper, 1)

    limits = (200, 200)
    executor.call(lambda _: resource.setrlimit(resource.RLIMIT_NOFILE, limits), WAIT, rank=0)
    before = executor.call(descriptors, WAIT, rank=0)
    for value in range(100):
        executor.call("keep", WAIT, args=(full(value, 256 * 1024),), rank=0)

    after = executor.call(descriptors, WAIT, rank=0)
    assert after - before <= 50
    kept = executor.call("totals_kept", WAIT, rank=0)
    assert kept == [value * 256 * 1024 for value in range(100)]


def test_answers_that_nobody_has_read_yet_leave_the_driver_its_descriptors(make: Make) -> None:
    executor = make(Keeper, 1)
    size = 132 * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        futures = [
            executor.call("made", WAIT, args=(size, value % 200), non_block=True, rank=0)
            for value in range(SLOTS + 256)  # as many as the arena holds, and the limit beyond
        ]
        kept = [future.result() for future in futures]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert all((array == value % 200).all() for value, array in enumerate(kept))


def test_bytes_of_every_kind_and_depth_travel(make: Make) -> None:
    executor = make(Keeper, 2)
    data = os.urandom(MIB)
    nested = {"list": [data, bytearray(data)], "tuple": (1, data, "text" * MIB), "empty": b""}
    many = [bytearray(20_000) for _ in range(3000)]
    whole = np.zeros(MIB, dtype=np.uint8)
    views = [whole[: MIB // 2], whole[: MIB // 2]]

    def kinds(_: object, *things: Any, **named: Any) -> list[tuple[str, int]]:
        return [(type(each).__name__, len(each)) for each in (*things, *named.values())]

    def shared(_: object, twice: list[Any], views: list[Any]) -> tuple[bool, bool]:
        return twice[0] is twice[1], bool(np.shares_memory(*views))

    sent = (data, bytearray(data))
    assert executor.call(kinds, WAIT, args=sent, kwargs={"more": data[1:]}, rank=0) == [
        ("bytes", MIB),
        ("bytearray", MIB),
        ("bytes", MIB - 1),
    ]
    assert executor.collective_rpc("echo", WAIT, args=(nested,)) == [nested] * 2
    assert executor.call("echo", WAIT, args=(many,), rank=0) == many
    # An object that stands twice arrives as one, views do not share memory.
    assert executor.call(shared, WAIT, ([whole, whole], views), rank=0) == (True, False)


def test_what_a_rank_that_died_had_read_is_used_again_and_idle_memory_goes_to_the_kernel(
    make: Make,
) -> None:
    executor = make(Keeper, 2, strategy=Strategy.ONE_FOR_ONE)

    executor.call("keep", WAIT, args=(full(1, 8 * MIB),), rank=1)
    with pytest.raises(WorkerDied):
        executor.call(
            lambda _, _array: os.kill(os.getpid(), signal.SIGKILL),
            WAIT,
            args=(full(2, 8 * MIB),),
            rank=1,
        )
    for value in range(5):
        totals = executor.collective_rpc("total", WAIT, args=(full(value, 8 * MIB),))
        assert totals == [value * 8 * MIB] * 2

    assert shared_bytes() <= 3 * (8 * MIB + 4096)
    executor.collective_rpc("echo", WAIT, args=(full(1, 32 * MIB),))
    assert shared_bytes() >= 64 * MIB
    wait_until(lambda: shared_bytes() < 4 * MIB)
    assert executor.collective_rpc("total", WAIT, args=(full(4),)) == [4 * MIB] * 2


def test_large_replies_of_every_rank_can_be_kept_and_outlive_worker_and_executor(
    make: Make,
) -> None:
    executor = make(Keeper, 4)
    kept: list[tuple[int, Any]] = []

    for value in range(10):
        replies = executor.collective_rpc("made", WAIT, args=(MIB, value))
        kept += [(value + rank, reply) for rank, reply in enumerate(replies)]
        replies[0] += 1
        kept[-4] = (value + 1, replies[0])
    unread = executor.collective_rpc("made", WAIT, args=(MIB, 5), non_block=True)
    executor.drain(WAIT)
    executor.close()

    assert all((reply == value).all() for value, reply in kept)
    assert [int(reply[-1]) for reply in unread.result(WAIT)] == [5, 6, 7, 8]


def test_a_message_or_reply_larger_than_memory_is_that_calls_error_and_no_more(make: Make) -> None:
    executor = make(Keeper, 1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    small = (MIB, limit[1])

    resource.setrlimit(resource.RLIMIT_FSIZE, small)
    try:
        with pytest.raises(MessageTooLarge) as caught:  # before it is written
            executor.call("total", WAIT, args=(np.zeros(1 << 31, dtype=np.uint8),), rank=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    executor.call(lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, small), WAIT, rank=0)
    with pytest.raises(MessageTooLarge) as too_large:
        executor.call("made", WAIT, args=(1 << 30, 0), rank=0)

    assert caught.value.size >= 1 << 31
    assert caught.value.limit == too_large.value.limit == MIB
    for later in (False, True):
        with pytest.raises(RemoteError, match="ValueError") as error:
            executor.call("fail", WAIT, args=(2 * MIB,), kwargs={"later": later}, rank=0)
        assert "in fail" in error.value.traceback or later
    assert executor.ranks[0].incarnation == 1
    assert executor.call("total", WAIT, args=(full(1),), rank=0) == MIB


def test_a_part_that_cannot_be_sent_ends_its_call_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(Keeper, 2)
    plane = executor._group.plane
    first = plane._table.all[0].channel
    send = type(first).send

    def refuse(self: Any, *packet: Any) -> bool:
        if self is first and packet[1] is not None:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return send(self, *packet)

    with monkeypatch.context() as patched:
        patched.setattr(plane.arena, "place", lambda _: None)  # so they travel in files
        patched.setattr(type(first), "send", refuse)
        with pytest.raises(RuntimeFault, match="total could not be sent to rank 0: .* references"):
            executor.scatter("total", args=[(full(1),), (full(2),)], timeout=WAIT)

    executor.drain(WAIT)  # the other rank has answered
    assert executor.scatter("total", args=[(full(1),), (full(2),)]) == [MIB, 2 * MIB]


def test_tensors_share_the_memory_they_arrived_in(torch_runtime: Any) -> None:
    torch = pytest.importorskip("torch")
    with Executor(Echo, 2, runtime=torch_runtime, launch=Launch(transport=TRANSPORT)) as executor:
        sent = {"a": torch.arange(MIB), "b": [torch.ones(3, 400_000), torch.ones(2)]}
        for reply in executor.collective_rpc("echo", WAIT, args=(sent,)):
            assert torch.equal(reply["a"], sent["a"])
            assert torch.equal(reply["b"][0], sent["b"][0])
            reply["a"].add_(1)
            assert int(reply["a"][-1]) == MIB


KILLS = 25
SIZE = 300_000


def test_no_kill_spoils_a_large_message_or_its_answer(make: Make) -> None:
    intensity = Intensity(10 * KILLS, 600.0)
    executor = make(Keeper, 3, strategy=Strategy.ONE_FOR_ONE, intensity=intensity)
    chance = random.Random(4)
    over = threading.Event()
    outcomes: list[tuple[int, int]] = []  # of each caller: answered, died
    wrong: list[Any] = []

    def call(number: int) -> None:
        answered = died = 0
        kept: list[tuple[int, Any]] = []
        while not over.is_set():
            value = (answered + died + number) % 200
            try:
                replies = executor.collective_rpc("echo", WAIT, args=(full(value, SIZE),))
            except WorkerDied:
                died += 1
                continue
            answered += 1
            kept = [*kept[-5:], *((value, reply) for reply in replies)]
            wrong.extend(value for value, reply in kept if not (reply == value).all())
        outcomes.append((answered, died))

    callers = [start_thread(call, number) for number in range(3)]
    for turn in range(KILLS):
        kill(executor, chance.randrange(3))
        wait_healed(executor, turn + 1)
    over.set()
    for caller in callers:
        caller.join(WAIT)

    assert not wrong
    assert len(outcomes) == 3  # no other error has ended one of them
    assert sum(answered for answered, _ in outcomes) > 0
    assert executor.collective_rpc("total", WAIT, args=(np.ones(SIZE, np.uint8),)) == [SIZE] * 3
