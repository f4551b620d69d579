"""What the codec keeps out of the pickle, and what comes back."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime.wire.codec import BUFFER_THRESHOLD, decode, encode
from phalanx.supervision import NotPicklable

LARGE = 1 << 20
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


def travel(value: Any) -> Any:
    encoded = encode(value, "it")
    return decode(encoded.body, [memoryview(bytearray(view)) for view in encoded.buffers])


@given(VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert travel(value) == value


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: ("method", (x,), {}), lambda x: ("m", (), {"k": x})]
)
def test_large_bytes_are_not_copied_into_the_pickle(kind: Any, wrap: Any) -> None:
    data = kind(LARGE)
    value = wrap(data)

    encoded = encode(value, "it")

    assert any(chunk is data for chunk in encoded.chunks)
    assert decode(encoded.body) == value
    assert encoded.size_bytes < LARGE + 200


def test_arrays_stay_outside_from_the_threshold_on() -> None:
    small, large = np.zeros(BUFFER_THRESHOLD - 1, np.uint8), np.zeros(BUFFER_THRESHOLD, np.uint8)

    encoded = encode([small, large], "it")

    assert [view.nbytes for view in encoded.buffers] == [BUFFER_THRESHOLD]


def test_an_array_that_does_not_lie_in_one_piece_travels_all_the_same() -> None:
    array = np.arange(LARGE, dtype=np.int64).reshape(1024, 1024)

    assert np.array_equal(travel(array[::2, ::3]), array[::2, ::3])
    assert np.array_equal(travel(array.T), array.T)


def test_what_is_defined_in_main_travels_by_value_however_much_there_is_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = type("Ours", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Ours", ours, raising=False)
    large = b"x" * 70_000  # keeps the pickler from making one chunk of it all

    encoded = encode(([ours() for _ in range(50_000)], large), "it")

    monkeypatch.undo()  # by name nobody would find it now
    arrived = decode(encoded.body, encoded.buffers)
    assert [type(each).__name__ for each in arrived[0]] == ["Ours"] * 50_000


def test_large_contents_that_mention_main_are_no_reason_to_pickle_by_value() -> None:
    for size in (LARGE, 10 * LARGE):
        content = b"__main__" * (size // 8)
        for value in (content, bytearray(content), content.decode()):
            encoded = encode((value, b"x" * 70_000), "it")

            assert b"cloudpickle" not in encoded.body
            assert decode(encoded.body, encoded.buffers)[0] == value


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(NotPicklable, match="the arguments of f"):
        encode(threading.Lock(), "the arguments of f")
