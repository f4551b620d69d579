"""Groups whose ranks are elsewhere, as they start: where they listen, links that break early."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.gateway_peers import listening
from tests.support.options import Make
from tests.support.processes import LONG, start_thread, wait_until
from tests.support.relayed_links import free_port, processes_named, processes_of
from tests.support.workers import NotesStarts

from phalanx import Launch, PhalanxError, WorkerContext
from phalanx.errors import StartFailed
from phalanx.runtime import Zmq
from phalanx.runtime.linux import procfs


class Waits(NotesStarts):
    """Says that it starts, and takes long."""

    def on_start(self, ctx: WorkerContext) -> None:
        super().on_start(ctx)
        time.sleep(600)


@pytest.mark.parametrize("what", ["gateway", "/relay"])
def test_a_start_whose_link_breaks_fails_and_leaves_nothing(
    make: Make, tmp_path: Path, what: str
) -> None:
    errors: list[BaseException] = []

    def build() -> None:
        try:
            make(Waits, args=(str(tmp_path),), name="early", launch=Launch(transport="zmq"))
        except PhalanxError as error:
            errors.append(error)

    thread = start_thread(build)
    wait_until((tmp_path / "0#1").exists)
    os.kill(processes_named("early", what)[0], signal.SIGKILL)
    thread.join(LONG)

    assert [type(error) for error in errors] == [StartFailed]
    assert "its link was lost" in str(errors[0])
    assert not processes_named("early", "")


def test_ranks_that_cannot_reach_the_driver_fail_the_start_and_say_where(make: Make) -> None:
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    there = Zmq(
        bind=f"tcp://127.0.0.1:{free_port()}", advertise=nowhere, heartbeat=0.1, lost_after=0.5
    )

    with pytest.raises(StartFailed, match=f"did not reach {nowhere} within lost_after=0.5 s"):
        make(launch=Launch(transport=there))


def test_an_address_in_use_is_told_when_the_group_is_built(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"

        with pytest.raises(
            StartFailed, match=f"cannot listen on {address}: Address already in use"
        ):
            make(launch=Launch(transport=Zmq(bind=address)))


@pytest.mark.parametrize(
    ("where", "listened"),
    [
        ({}, "0100007F"),
        ({"bind": "tcp://lo"}, "0100007F"),
        ({"bind": "tcp://[::1]"}, "00000000000000000000000001000000"),
        ({"ipc": True}, "@phalanx-link"),
    ],
    ids=["default", "interface", "version 6", "ipc"],
)
def test_one_process_listens_for_ranks_and_where_it_was_told(
    make: Make, where: dict[str, Any], listened: str
) -> None:
    before = listeners()
    ex = make(launch=Launch(transport=Zmq(**where)))
    (gateway,) = processes_of(ex, "gateway")

    assert ex.collective_rpc("rank", LONG) == [0, 1]
    found = listeners() - before
    meeting = (os.getpid(), "0100007F")  # of a process group, on loopback
    assert meeting in found
    ((pid, place),) = found - {meeting}
    assert pid == gateway
    assert listened in place


def listeners() -> set[tuple[int, str]]:
    """Who listens where, of this process and what it has started."""
    tasks = procfs.read_all()
    ours = [pid for pid in tasks if os.getpid() in procfs.ancestors(pid)]
    return {(pid, place) for pid in ours for place in listening(pid)}
