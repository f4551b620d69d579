"""Long messages go in pieces as large as what crosses in time; short ones pass them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.link.messages import (
    Kill,
    Launch,
    MalformedMessage,
    Message,
    Piece,
    RankLaunch,
    Withdraw,
    decode,
    encode,
)
from phalanx.cluster.link.pieces import Inbox, Outbox

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


SIZES = st.lists(st.one_of(st.just(0), st.integers(20_000, 300_000)), max_size=6)


@given(SIZES, st.floats(0.0, 1.0), st.integers(0, 12), st.integers(0, 5))
def test_messages_arrive_whole_and_in_order_but_for_a_launch_that_is_withdrawn(
    sizes: list[int], took: float, withdraw_at: int, withdrawn: int
) -> None:
    sent: list[Message] = [
        launch(n, size) if size else Kill(rank=n, incarnation=1) for n, size in enumerate(sizes)
    ]
    outbox, inbox, came, now, turn = Outbox(PACE), Inbox(), list[Message](), 0.0, 0
    for message in sent:
        outbox.put(encode(message), message.number if isinstance(message, Launch) else -1)

    is_withdrawn = False
    while True:
        if turn == withdraw_at:
            is_withdrawn = outbox.withdraw(withdrawn)
        if (parts := outbox.next(now)) is None:
            break
        turn += 1
        message = decode(parts)
        if isinstance(message, Piece):
            assert outbox.next(now) is None  # until that has been taken
            now += took
            outbox.taken(now)
        with contextlib.suppress(MalformedMessage):
            whole = inbox.put(message) if isinstance(message, Piece) else message
            came += [] if whole is None else [whole]

    long = [each for each in sent if isinstance(each, Launch)]
    if is_withdrawn:
        long = [each for each in long if each.number != withdrawn]
    assert came == [*(each for each in sent if isinstance(each, Kill)), *long]


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
