"""The arena: who may use which memory when."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator

import pytest

from phalanx.runtime.linux import procfs
from phalanx.runtime.memory.arena import ARENA_IDLE, PAGE, SLOTS, Arena, Borrower, Extent
from phalanx.runtime.memory.mapping import COPY_LIMIT, ArenaReader
from phalanx.runtime.wire.channel import SocketChannel
from phalanx.runtime.wire.packet_encoder import Payload

LARGE = COPY_LIMIT + 5 * PAGE


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(64 * LARGE // PAGE * PAGE)
    yield arena
    arena.close()


class Peer:
    """A reader in this process, with counters of its own."""

    def __init__(self, arena: Arena) -> None:
        counters = memoryview(bytearray(8 * SLOTS)).cast("Q")
        self.borrower = Borrower(counters)
        self.reader = ArenaReader(os.dup(arena.fd), counters)

    def read(self, extent: Extent, size: int) -> memoryview:
        return self.reader.open(extent.slot, extent.start, size)


def send(arena: Arena, content: bytes, *peers: Peer) -> Extent:
    extent = arena.place(len(content))
    assert extent is not None
    extent.write([memoryview(content)], [0])
    for peer in peers:
        extent.lend(peer.borrower)
    extent.let_go()
    return extent


def filled(byte: int, size: int = LARGE) -> bytes:
    return bytes([byte]) * size


def test_a_place_is_used_again_once_every_reader_has_let_go(arena: Arena) -> None:
    one, two = Peer(arena), Peer(arena)
    extent = send(arena, filled(1), one, two)
    views = [one.read(extent, LARGE), two.read(extent, LARGE)]

    while_both_read = send(arena, filled(2)).start
    views.pop()
    while_one_reads = send(arena, filled(3)).start
    views.pop()
    after = send(arena, filled(4)).start

    assert (while_both_read, while_one_reads) == (extent.start + extent.pages * PAGE,) * 2
    assert after == extent.start


def test_a_slice_of_a_view_keeps_its_place(arena: Arena) -> None:
    peer = Peer(arena)
    extent = send(arena, filled(1), peer)
    part = peer.read(extent, LARGE)[100:200]
    gc.collect()

    assert send(arena, filled(2), peer).start != extent.start
    assert part == filled(1, 100)


def test_a_view_in_a_dead_cycle_is_whole_until_the_last_finalizer_has_run(arena: Arena) -> None:
    peer = Peer(arena)
    seen: list[bytes] = []

    class Cyclic:
        def __init__(self, view: memoryview) -> None:
            self.view = view
            self.me = self

        def __del__(self) -> None:
            send(arena, filled(2), peer)
            seen.append(bytes(self.view[:1]))

    Cyclic(peer.read(send(arena, filled(1), peer), LARGE))
    gc.collect()

    assert seen == [b"\1"]


def test_a_message_sent_twice_to_one_reader_is_held_until_both_are_dropped(arena: Arena) -> None:
    peer = Peer(arena)
    extent = arena.place(LARGE)
    assert extent is not None
    extent.lend(peer.borrower)
    extent.lend(peer.borrower)
    extent.let_go()

    peer.reader.give_back(extent.slot)
    before = send(arena, filled(2)).start
    peer.reader.give_back(extent.slot)
    after = send(arena, filled(2)).start

    assert before != extent.start
    assert after == extent.start


def let_sender_go(_extent: Extent, _peer: Peer) -> None:
    """The sender alone has held it: it might have sent it again."""


def take_back(extent: Extent, peer: Peer) -> None:
    """As where a message cannot be sent."""
    extent.lend(peer.borrower)
    Payload.in_arena(extent, LARGE).take_back(peer.borrower)


def let_reader_die(extent: Extent, peer: Peer) -> None:
    extent.lend(peer.borrower)
    peer.borrower.forget()


@pytest.mark.parametrize("hold", [let_sender_go, take_back, let_reader_die])
def test_a_place_is_held_until_its_sender_has_let_go_and_by_nobody_else(
    arena: Arena, hold: Callable[[Extent, Peer], None]
) -> None:
    extent = arena.place(LARGE)
    assert extent is not None
    hold(extent, Peer(arena))

    while_kept = send(arena, filled(2)).start
    extent.let_go()

    assert while_kept != extent.start
    assert send(arena, filled(3)).start == extent.start


def test_a_forked_child_closes_the_drivers_sockets_once(arena: Arena) -> None:
    channel: list[SocketChannel] = [SocketChannel.create(arena, 1)]
    pid = os.fork()
    if pid == 0:
        taken = [os.dup(2) for _ in range(64)]  # has the numbers of what the fork closed
        channel.clear()
        gc.collect()
        still_open = all(os.path.exists(f"/proc/self/fd/{fd}") for fd in taken)  # noqa: PTH110
        os._exit(0 if still_open else 1)
    _, status = os.waitpid(pid, 0)
    channel[0].close()

    assert status == 0


def test_small_messages_are_copied_and_given_back_at_once(arena: Arena) -> None:
    peer = Peer(arena)
    extent = send(arena, filled(1, 1000), peer)

    view = peer.read(extent, 1000)

    assert send(arena, filled(2, 1000)).start == extent.start
    assert view == filled(1, 1000)
    view[:] = filled(3, 1000)  # writable, as a mapping is


def test_a_full_arena_has_no_place_and_a_trimmed_one_no_memory(arena: Arena) -> None:
    extents: list[Extent] = []
    while (extent := arena.place(8 * LARGE)) is not None:
        extents.append(extent)

    for extent in extents:
        extent.let_go()
    arena.trim()

    assert len(extents) == 8
    assert os.fstat(arena.fd).st_blocks == 0
    assert not arena.is_warm


def test_what_had_been_had_of_a_place_goes_back_where_the_rest_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena.create()
    rooms = [1 << 30, 0, 1 << 30, 0]  # somebody else takes it meanwhile, and again
    monkeypatch.setattr("phalanx.runtime.memory.budget.writable_bytes", lambda _: rooms.pop(0))

    place = arena.place(20 << 20)

    assert (place, rooms) == (None, [])
    assert os.fstat(arena.fd).st_blocks == 0
    arena.close()


def test_room_is_looked_for_only_for_what_has_no_memory_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena.create()
    first = arena.place(12 << 20)
    assert first is not None
    first.let_go()
    looked: list[int] = []

    def look(wanted: int) -> int:
        looked.append(wanted)
        return 1 << 30

    monkeypatch.setattr("phalanx.runtime.memory.budget.writable_bytes", look)

    second = arena.place(16 << 20)

    assert second is not None
    assert (second.start, looked) == (first.start, [4 << 20, 4 << 20])
    arena.close()


def test_trimming_spares_what_is_read(arena: Arena) -> None:
    peer = Peer(arena)
    first = send(arena, filled(1), peer)
    second = send(arena, filled(2), peer)
    view = peer.read(second, LARGE)
    peer.reader.give_back(first.slot)

    arena.trim()

    assert view == filled(2)
    assert arena.is_warm
    assert os.fstat(arena.fd).st_blocks * 512 == second.pages * PAGE


def test_idle_memory_goes_back_after_two_seconds_and_kept_memory_within_ten_more(
    arena: Arena,
) -> None:
    peer = Peer(arena)
    view: list[memoryview] = [peer.read(send(arena, filled(1), peer), LARGE)]
    now = time.monotonic()
    waits: list[float] = []
    for _ in range(8):
        wait = arena.trim_if_idle(now)
        assert wait is not None
        waits.append(wait)
        now += wait

    view.clear()

    assert waits[0] <= ARENA_IDLE
    assert max(waits) <= 10.0
    assert arena.trim_if_idle(now) is None
    assert os.fstat(arena.fd).st_blocks == 0


def test_a_place_can_be_filled_though_its_arena_was_closed_meanwhile() -> None:
    arena = Arena.create(LARGE // PAGE * PAGE)
    extent = arena.place(LARGE)
    assert extent is not None

    arena.close()
    extent.write([memoryview(filled(1))], [0])

    assert extent.window[:LARGE] == filled(1)
    assert arena.place(LARGE) is None


@pytest.mark.parametrize(
    ("slot", "start", "size"),
    [(SLOTS, 0, 10), (0, 1, 10), (0, 0, 0), (0, 1 << 60, 10), (0, 0, 1 << 60), (0, PAGE, 1 << 40)],
)
def test_a_place_that_is_none_is_refused(arena: Arena, slot: int, start: int, size: int) -> None:
    with pytest.raises(ValueError, match="no place"):
        Peer(arena).reader.open(slot, start, size)


def test_without_descriptors_a_message_is_copied(arena: Arena) -> None:
    peer = Peer(arena)
    extent = send(arena, filled(1), peer)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        view = peer.read(extent, LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert view == filled(1)


def test_a_channel_for_which_descriptors_are_short_leaves_none(arena: Arena) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(procfs.numbers_in("/proc/self/fd"))
    fillers: list[int] = []
    while not fillers or fillers[-1] < highest:
        fillers.append(os.dup(arena.fd))
    made = 0
    try:
        for free in range(12):
            resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + free, hard))
            with contextlib.suppress(OSError):
                channel = SocketChannel.create(arena, 1)
                channel.close()
                made += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)

    assert 0 < made < 12


def test_a_forked_child_keeps_what_its_parent_gives_back(arena: Arena) -> None:
    peer = Peer(arena)
    extent = send(arena, filled(1), peer)
    view = peer.read(extent, LARGE)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        os._exit(0 if bytes(view) == filled(1) else 1)

    del view
    again = send(arena, filled(2), peer)
    os.write(tell, b"x")

    assert again.start == extent.start
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(told)
    os.close(tell)
