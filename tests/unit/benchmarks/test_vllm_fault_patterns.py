"""What an attack on an engine says of how long its clients waited."""

from __future__ import annotations

import os
import random
import signal
from types import SimpleNamespace

import pytest
from benchmarks.vllm import fault_patterns, survive
from benchmarks.vllm.processes import strike


def test_what_was_under_way_when_a_rank_died_is_not_taken_for_the_answer_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = fault_patterns.Attack("none", 1, random.Random(1))
    moments = iter([10.0, 10.1, 11.001, 15.0, 15.1, 15.3, 21.2, 21.3])
    monkeypatch.setattr(fault_patterns, "time", SimpleNamespace(monotonic=lambda: next(moments)))

    for _ in range(8):
        one.arrived(1)
    assert one.waits == []
    one.struck += [11.0, 15.2]

    assert one.waits == pytest.approx([4.0, 6.0])


def test_a_rank_that_was_not_there_was_not_struck() -> None:
    assert strike(os.getpid(), (0, 1), signal.SIGCONT) is None


def test_an_attack_that_there_is_not_is_told_before_an_engine_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        survive.main(["--kinds", "decode,prefil"])

    assert "'prefil': there is no such one; there are decode, prefill" in capsys.readouterr().err
