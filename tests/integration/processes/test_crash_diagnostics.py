"""A worker that dies of itself says why, where the driver can read it afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence

import pytest
from tests.support.programs import run_python

from phalanx.runtime.observe.diagnostics import read_crash_output


@pytest.fixture
def faults() -> Iterator[int]:
    fd = os.memfd_create("crash-output")
    yield fd
    os.close(fd)


def die(faults: int, code: str) -> tuple[int, str]:
    """Return how a process ended that ran *code*, and its stderr."""
    head = f"""
from phalanx.runtime.observe.diagnostics import install_crash_output
import sys
install_crash_output({faults})
"""
    done = run_python("-c", head + code, pass_fds=[faults])
    return done.returncode, done.stderr


ODD = """
class Odd(Exception):
    @property
    def __notes__(self): raise RuntimeError("no notes")
    __traceback__ = property(lambda self: 1 / 0)
    __cause__ = property(lambda self: 1 / 0)
sys.excepthook(Odd, Odd(), None)
"""
LAST_OF_THREE = """
import threading
def fail(number): raise RuntimeError(f"thread {number}")
for number in range(3):
    thread = threading.Thread(target=fail, args=(number,))
    thread.start(); thread.join()
"""
FIRST_THEN_ABORT = "sys.excepthook(KeyError, KeyError('first'), None)\nimport os; os.abort()"


@pytest.mark.parametrize(
    ("code", "status", "begins", "holds"),
    [
        (ODD, 0, "Odd, which cannot be shown: ZeroDivisionError\n", ()),
        (LAST_OF_THREE, 0, "", [f"RuntimeError: thread {number}\n" for number in range(3)]),
        (
            FIRST_THEN_ABORT,
            -signal.SIGABRT,
            "",
            ["KeyError: 'first'", "Fatal Python error: Aborted\n"],
        ),
    ],
    ids=["that cannot be shown", "of several threads", "before a fatal signal"],
)
def test_exceptions_and_stacks_at_fatal_signals_are_kept_in_their_order(
    faults: int, code: str, status: int, begins: str, holds: Sequence[str]
) -> None:
    ended, _ = die(faults, code)

    words = read_crash_output(faults)

    assert ended == status
    assert words.startswith(begins)
    places = [words.index(each) for each in holds]
    assert places == sorted(places)


def test_an_exception_nobody_caught_is_kept_and_shown_as_ever(faults: int) -> None:
    status, stderr = die(faults, "raise ValueError('no such shard')")

    words = read_crash_output(faults)

    assert status == 1
    assert words.startswith("Traceback (most recent call last):")
    assert words.endswith("\nValueError: no such shard\n")
    assert "ValueError: no such shard" in stderr


def test_a_process_that_was_killed_or_left_says_nothing(faults: int) -> None:
    die(faults, "import os; os.kill(os.getpid(), 9)")
    die(faults, "raise SystemExit(3)")
    die(faults, "import threading, sys; threading.Thread(target=sys.exit).start()")

    assert read_crash_output(faults) == ""


def test_words_without_end_are_cut(faults: int) -> None:
    die(
        faults,
        "for _ in range(4000): sys.excepthook(ValueError, ValueError('x' * 1000), None)",
    )

    assert os.fstat(faults).st_size < 2 << 20
    assert read_crash_output(faults).endswith("\nValueError: " + "x" * 1000 + "\n")
    end = os.fstat(faults).st_size
    os.write(faults, b"stacks")
    assert read_crash_output(faults, end=end).endswith("\nValueError: " + "x" * 1000 + "\n")
    assert read_crash_output(faults, end) == "stacks"
