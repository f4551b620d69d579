"""Networks are cut, one way or both, for good or for a while: that is a death or it is nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.options import Make
from tests.support.rank_faults import OFTEN, wait_healed
from tests.support.relayed_links import (
    NEVER,
    QUICK,
    Relay,
    free_port,
    ip,
    namespace,
    wait_running,
)

from phalanx import Executor, Launch
from phalanx.errors import WorkerDied
from phalanx.runtime import Zmq

Behind = Callable[..., tuple[Executor[Any], Relay]]
LONG = 30.0
MIB = 1 << 20
USUAL = {"launch": {"transport": "zmq"}, "intensity": OFTEN}


@pytest.fixture
def relay_of() -> Iterator[Callable[..., Relay]]:
    with contextlib.ExitStack() as made:
        yield lambda *ends, **more: made.enter_context(contextlib.closing(Relay(*ends, **more)))


@pytest.fixture
def behind(make: Make, relay_of: Callable[..., Relay]) -> Behind:
    """Groups whose ranks are reached through a relay."""

    def build(world_size: int = 2, link: Zmq = QUICK) -> tuple[Executor[Any], Relay]:
        port, between = free_port(), free_port()
        there = replace(
            link, bind=f"tcp://127.0.0.1:{port}", advertise=f"tcp://127.0.0.1:{between}"
        )
        relay = relay_of("127.0.0.1", between, "127.0.0.1", port)
        return make(world_size=world_size, launch=Launch(transport=there)), relay

    return build


def test_a_cut_that_heals_before_the_limit_costs_time_alone(behind: Behind, tmp_path: Path) -> None:
    ex, relay = behind(link=Zmq(heartbeat=0.2, lost_after=6.0))
    notes = tmp_path / "notes"

    relay.mute()
    calls = [
        ex.collective_rpc("note", args=(str(notes), f"n{i}"), non_block=True) for i in range(8)
    ]
    large = ex.collective_rpc("echo", args=(np.arange(MIB),), non_block=True)
    time.sleep(1.5)  # what is tested is that this much passes
    relay.heal()

    assert [call.result(LONG) for call in calls] == [[None, None]] * 8
    assert all((got == np.arange(MIB)).all() for got in large.result(LONG))
    assert ex.status().restarts == 0
    lines = notes.read_text().splitlines()
    assert sorted(lines) == sorted(f"n{i} rank={r} inc=1" for i in range(8) for r in range(2))


def test_the_arguments_of_a_call_cross_once_for_all_ranks(behind: Behind) -> None:
    ex, relay = behind(4)
    values = np.ones(MIB)  # of 8 bytes each

    relay.mute("down", 12 * MIB)  # more than one copy, and less than two

    total = ex.collective_rpc(lambda _, these: float(these.sum()), LONG, args=(values,))
    relay.heal()
    assert total == [float(MIB)] * 4
    assert ex.status().restarts == 0
    assert ex.collective_rpc("echo", LONG, args=(values[:8],))[3].tolist() == [1.0] * 8


def test_what_comes_when_a_cut_heals_too_late_is_nobodys_answer(behind: Behind, gate: Path) -> None:
    ex, relay = behind()
    call = ex.collective_rpc("gated", args=(str(gate), "old"), non_block=True)
    wait_running(ex, 0, 1)

    relay.mute("up")
    gate.touch()
    with pytest.raises(WorkerDied, match="its link was lost"):
        call.result(LONG)
    wait_healed(ex)
    relay.heal()

    assert [ex.collective_rpc("echo", LONG, args=(i,)) for i in range(20)] == [
        [i, i] for i in range(20)
    ]
    assert {info.incarnation for info in ex.ranks} == {2}


@pytest.mark.parametrize("way", ["up", "down"])
def test_silence_one_way_in_the_middle_of_a_large_message_is_a_death_and_leaves_nothing_of_it(
    behind: Behind, way: str
) -> None:
    ex, relay = behind(1)
    large = np.arange(2 * MIB)
    assert (ex.call("echo", LONG, args=(large,), rank=0) == large).all()

    relay.mute(way, after=large.nbytes // 2)
    with pytest.raises(WorkerDied, match="its link was lost") as caught:
        ex.call("echo", LONG, args=(large,), rank=0)
    assert str(caught.value.reports[0].reason).startswith("unresponsive")

    assert (ex.call("echo", LONG, args=(large,), retries=3, rank=0) == large).all()


@pytest.mark.parametrize("way", ["up", "down"])
def test_what_is_heard_twice_is_done_once_and_breaks_the_link(
    behind: Behind, tmp_path: Path, way: str
) -> None:
    ex, relay = behind(1)
    notes = tmp_path / "notes"
    assert ex.call("note", LONG, args=(str(notes), "n"), rank=0) is None

    relay.replay(way)
    wait_healed(ex)

    assert "its link was lost" in str(ex.status().reports[0].reason)
    assert ex.call("echo", LONG, args=(1,), retries=3, rank=0) == 1
    assert notes.read_text() == "n rank=0 inc=1\n"


def test_a_cut_between_network_namespaces_ends_like_a_death(
    make: Make, relay_of: Callable[..., Relay]
) -> None:
    with namespace() as (name, cable, here, beyond):
        port = free_port()
        there = replace(QUICK, bind=f"tcp://{here}:{port}", advertise=f"tcp://{beyond}:{port}")
        relay_of(beyond, port, here, port, within=name)
        ex = make(launch=Launch(transport=there))
        pids = ex.collective_rpc(lambda _: os.getpid(), LONG)

        call = ex.collective_rpc("gated", args=(NEVER,), non_block=True)
        wait_running(ex, 0, 1)
        ip("link", "set", cable, "down")
        with pytest.raises(WorkerDied, match="its link was lost"):
            call.result(LONG)
        ip("link", "set", cable, "up")

        assert not set(pids) & set(ex.collective_rpc(lambda _: os.getpid(), LONG, retries=9))
