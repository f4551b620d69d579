"""Long messages go in pieces as large as what crosses in time; short ones pass them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.link.chunking import Inbox, Outbox
from phalanx.cluster.link.messages import (
    Launch,
    Leave,
    MalformedMessage,
    Message,
    Piece,
    RankLaunch,
    Withdraw,
    decode,
    encode,
)
from phalanx.cluster.node_process.output import OutputWindow

PACE = 0.1


def launch(number: int, size: int) -> Launch:
    rank = RankLaunch(rank=0, incarnation=1, entry="m:f", label="tp/0", payload=b"x" * size)
    return Launch(number=number, ranks=(rank,))


def piece_of(outbox: Outbox, now: float) -> Piece:
    parts = outbox.next(now)
    assert parts is not None
    piece = decode(parts)
    assert isinstance(piece, Piece)
    return piece


@given(st.lists(st.one_of(st.just(0), st.integers(1, 300_000)), max_size=6), st.floats(0.0, 1.0))
def test_messages_arrive_whole_and_in_order_and_short_ones_before_long_ones(
    sizes: list[int], took: float
) -> None:
    sent: list[Message] = [
        launch(n, size) if size else Withdraw(number=100 + n) for n, size in enumerate(sizes)
    ]
    outbox, inbox = Outbox(PACE), Inbox()
    for message in sent:
        outbox.put(encode(message))

    came = received(outbox, inbox, took)

    short = [message for message in sent if sum(map(len, encode(message))) <= 16 * 1024]
    assert came == [*short, *(message for message in sent if message not in short)]


def received(outbox: Outbox, inbox: Inbox, took: float = 0.0) -> list[Message]:
    """Return all that comes, if each piece takes so many seconds."""
    came, now = list[Message](), 0.0
    while (parts := outbox.next(now)) is not None:
        message = decode(parts)
        if isinstance(message, Piece):
            assert outbox.next(now) is None  # until that has been taken
            now += took
            outbox.taken(now)
            with contextlib.suppress(MalformedMessage):
                came += filter(None, [inbox.put(message)])
        else:
            came.append(message)
    return came


def test_short_messages_overtake_long_ones_and_a_withdrawn_launch_is_not_sent_on() -> None:
    outbox, inbox, leave = Outbox(PACE), Inbox(), Leave()
    for number in (1, 2, 3):
        outbox.put(encode(launch(number, 1_000_000)))
    assert inbox.put(piece_of(outbox, 0.0)) is None

    for message in (Withdraw(number=1), Withdraw(number=3), leave):
        outbox.put(encode(message))

    assert [outbox.next(1.0) for _ in range(3)] == [
        encode(message) for message in (Withdraw(number=1), Withdraw(number=3), leave)
    ]
    assert outbox.next(1.0) is None
    outbox.taken(1.0)
    assert received(outbox, inbox) == [launch(2, 1_000_000)]


def test_a_piece_is_as_large_as_what_crosses_in_time() -> None:
    outbox, now, rate = Outbox(PACE), 0.0, 1e6
    outbox.put(encode(launch(1, 30_000_000)))
    took = list[float]()

    for seconds in (10.0, 20.0):
        while now < seconds:
            sent_at, piece = now, piece_of(outbox, now)
            now += 0.001 + len(piece.data) / rate
            outbox.taken(now)
            took.append(now - sent_at)
        rate /= 4.0

    assert max(took[4:]) < 4 * PACE  # just after it has become slower
    assert sum(each > 2 * PACE for each in took) <= 1
    assert took[-1] > PACE / 8


def test_no_more_output_is_under_way_than_crosses_in_time() -> None:
    window, now, under_way, most = OutputWindow(PACE), 0.0, 0, list[int]()

    for took in (0.001, 0.08):
        for _ in range(100):
            while window.has_room:
                window.sent(now)
                under_way += 1
            most.append(under_way)
            now, under_way = now + took, under_way - 1
            window.taken(now)

    assert max(most[:100]) * 0.001 > PACE / 10
    assert max(most[120:]) * 0.08 < 3 * PACE


def test_what_was_not_sent_changes_nothing_when_it_is_taken() -> None:
    outbox = Outbox(PACE)

    outbox.taken(1.0)
    outbox.put(encode(Withdraw(number=1)))

    assert outbox.next(2.0) == encode(Withdraw(number=1))
    assert outbox.next(2.0) is None


@pytest.mark.parametrize("sizes", [(4,), (2, 2, 2), (-1, 6)])
def test_pieces_of_no_message_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(MalformedMessage):
        Inbox().put(Piece(data=b"{}xyz", sizes=sizes))
