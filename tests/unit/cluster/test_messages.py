"""Messages of control links: to bytes and back, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.link.messages import (
    Ended,
    Launch,
    MalformedMessage,
    Message,
    RankLaunch,
    decode,
    encode,
)

KINDS = Message.kinds.values()
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
st.register_type_strategy(float, FLOATS)
MESSAGES = st.one_of([st.from_type(kind) for kind in KINDS])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)


@given(MESSAGES)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.lists(st.binary(max_size=50), max_size=3))
def test_noise_is_no_message(parts: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        decode(parts)


@given(MESSAGES, st.data())
def test_a_message_with_another_value_in_it_is_decoded_to_what_it_says_or_refused(
    message: Message, data: st.DataObject
) -> None:
    head, *blobs = encode(message)
    fields: dict[str, Any] = json.loads(head)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)

    try:
        decoded = decode([json.dumps(fields).encode(), *blobs])
    except MalformedMessage:
        return

    assert json.loads(encode(decoded)[0]) == fields


@pytest.mark.parametrize(
    "head",
    [
        b'{"kind": "Beat"}',
        b'{"kind": "Beat", "number": 1, "more": 1}',
        b'{"kind": "Beat", "number": true}',
        b'{"kind": "Beat", "number": 1.0}',
        b'{"kind": "Beat", "number": "1"}',
        b'{"kind": "Beat", "number": null}',
        b'{"kind": "Message"}',
        b'{"kind": ["Beat"], "number": 1}',
        b'{"number": 1}',
        b'["Beat", 1]',
        b"[" * 100_000,
        b'{"kind": "Greeting"}',
        encode(Ended(rank=0, incarnation=1, rusage={"s": 9}))[0].replace(b"9", b"9" * 400),
    ],
)
def test_what_is_almost_a_message_is_refused(head: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode([head])


def test_numbers_that_json_has_not_are_refused() -> None:
    message = Ended(rank=0, incarnation=1, rusage={"ru_maxrss": 1.0})
    head = encode(message)[0]

    with pytest.raises(MalformedMessage):
        decode([head.replace(b"1.0", b"NaN")])


@pytest.mark.parametrize("blobs", [[], [b"a"], [b"a", b"b", b"c"], [b"twice", b"none"]])
def test_byte_strings_that_are_missing_left_over_or_taken_twice_are_refused(
    blobs: list[bytes],
) -> None:
    ranks = (RankLaunch(rank=0, incarnation=1, entry="m:f", label="a", payload=b"a"),) * 2
    head = encode(Launch(number=1, ranks=ranks))[0]
    if b"twice" in blobs:
        head = head.replace(b'"payload": 1', b'"payload": 0')

    with pytest.raises(MalformedMessage):
        decode([head, *blobs])
