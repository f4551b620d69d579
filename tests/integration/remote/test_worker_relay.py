"""The process beside the workers of a group: one after the other, each known by its number."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from tests.support.gateway_peers import LONG, Driver
from tests.support.processes import wait_until

from phalanx.runtime import RelaySlot, Runtime, WorkerRelay


def test_the_end_of_each_is_told_with_the_number_that_its_slots_have(
    driver: Driver, runtime: Runtime
) -> None:
    told: list[tuple[int, str, bool]] = []
    relay = WorkerRelay(runtime.launcher, "relay", lambda *exit: told.append(exit))
    driver.gateway.open()

    def slot() -> RelaySlot:
        deadline = time.monotonic() + LONG
        invitation = driver.gateway.invite(0)
        return relay.open_slots(invitation, [(1, 1)], deadline=deadline, is_wanted=lambda: True)[0]

    with contextlib.closing(relay):
        for number in (1, 2):
            with contextlib.closing(slot()) as beside:
                assert beside.relay == number
                assert relay.pid is not None
                os.kill(relay.pid, signal.SIGKILL)
                wait_until(lambda: len(told) == beside.relay)
        with contextlib.closing(slot()) as beside:
            assert beside.relay == 3

    assert [(number, by_itself) for number, _, by_itself in told] == [(1, False), (2, False)]
    assert all("SIGKILL" in why for _, why, _ in told)
