"""What a person sees: safe to show, one line per line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime.observe.console_text import prefix_of, render, render_lines, text_of
from phalanx.runtime.output.reader import LineSplitter


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", "plain"),
        ("caf\u00e9 \u2713".encode(), "caf\u00e9 \u2713"),
        (b"tab\tstays", "tab\tstays"),
        (b"\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        (b"\x1b[2J", "\\x1b[2J"),
        ("\x9b2J".encode(), "\\x9b2J"),
        (b"\xff\xfe", "\\xff\\xfe"),
        (b"10%\r50%\r100%", "100%"),
        (b"dos line\r", "dos line"),
    ],
)
def test_a_line_is_shown_so_that_no_escape_reaches_the_terminal(line: bytes, shown: str) -> None:
    assert text_of(line) == shown


def test_a_users_own_report_does_not_hide_the_worker_that_logs_it() -> None:
    about = {"kind": "log", "group": "tp", "rank": 2, "incarnation": 1, "pid": 7, "event": "eval"}

    assert prefix_of({**about, "report": {"loss": 0.1}}) == prefix_of(about) != "[driver]"


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), min_size=1))
def test_many_lines_at_once_look_as_they_do_one_by_one(lines: list[bytes]) -> None:
    expected = "".join(f"[x] {text_of(line)}\n" for line in lines).encode()

    assert render_lines("[x]", lines) == expected


@pytest.mark.parametrize("mark", "\u061c\u200e\u200f\u2028\u202a\u202e\u2066\u2069")
def test_a_direction_mark_or_line_separator_of_a_line_is_escaped_among_others(mark: str) -> None:
    shown = render_lines("[x]", [f"a{mark}b".encode(), b"plain"])

    assert shown.decode() == f"[x] a\\u{ord(mark):04x}b\n[x] plain\n"


@given(st.lists(st.binary(max_size=30)), st.integers(1, 20))
def test_lines_come_out_once_and_in_order_however_they_are_cut(
    chunks: list[bytes], limit: int
) -> None:
    splitter = LineSplitter(limit)
    pieces: list[bytes] = []

    for chunk in chunks:
        pieces += splitter.feed(chunk)
    pieces += splitter.flush()

    assert b"".join(pieces) == b"".join(chunks).replace(b"\n", b"")


@given(st.lists(st.binary(max_size=30)))
def test_lines_within_the_limit_are_the_lines_that_were_written(chunks: list[bytes]) -> None:
    splitter = LineSplitter()

    lines = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()

    whole = b"".join(chunks).split(b"\n")
    assert lines == (whole if whole[-1] else whole[:-1])


def test_a_record_is_one_line_and_its_traceback_lines_below() -> None:
    record = {
        "timestamp": "2026-01-02T03:04:05.678901+00:00",
        "level": "error",
        "event": "step.failed",
        "loss": 0.123456789,
        "text": "two words",
        "evil": "\x1b[2J",
        "rank": 1,
        "exception": [
            {
                "exc_type": "ValueError",
                "exc_value": "no\nsuch shard",
                "frames": [{"filename": "w.py", "lineno": 3, "name": "forward"}],
            }
        ],
    }

    shown = render(record, "[tp/1 #1 7]").decode()

    assert shown == (
        "03:04:05.678 error    [tp/1 #1 7] step.failed"
        " loss=0.123457 text='two words' evil='\\x1b[2J'\n"
        "[tp/1 #1 7]   w.py:3 in forward\n"
        "[tp/1 #1 7]   ValueError: no\n"
        "[tp/1 #1 7]   such shard\n"
    )


EVIL = "a\x1b]0;t\x07\x9b2J\x7f\u0085\u2028\u202eb"


@given(
    st.sampled_from(["log", "event", "stdout", "stderr"]),
    st.dictionaries(
        st.sampled_from(["text", "event", "level", "timestamp", "group", "coordinates", EVIL]),
        st.just(EVIL) | st.just([EVIL]) | st.just({EVIL: EVIL}),
    ),
    st.sampled_from(
        [
            None,
            EVIL,
            [{"exc_type": EVIL, "exc_value": EVIL, "frames": [{"filename": EVIL, "name": EVIL}]}],
        ]
    ),
)
def test_no_control_character_of_a_record_is_shown_wherever_it_stands(
    kind: str, fields: dict[str, object], exception: object
) -> None:
    record = {"rank": 0, "incarnation": 1, "group": "g", **fields, "kind": kind}

    shown = render({**record, "exception": exception}).decode()

    assert all(character.isprintable() for character in shown.replace("\n", ""))


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (
            {"kind": "stdout", "seq": 4, "group": "tp", "rank": 0, "incarnation": 1, "text": "x"},
            "[tp/0 #1] x\n",
        ),
        (
            {"kind": "event", "event": "phalanx.group_up", "group": "tp", "epoch": 3},
            " info     [driver] phalanx.group_up group=tp epoch=3\n",
        ),
        (
            {"kind": "event", "event": "e", "group": "tp", "rank": 1, "incarnation": 2, "n": 5},
            " info     [tp/1 #2] e n=5\n",
        ),
        ({"kind": "log", "event": "e", "report": 7}, " info     [driver] e\n[driver]   7\n"),
    ],
)
def test_a_message_of_the_stream_looks_as_on_the_driver_s_console(
    record: dict[str, object], shown: str
) -> None:
    assert render(record).decode() == shown
