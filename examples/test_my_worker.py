"""Tests of a worker whose process dies: with pytest, real kills and chaos.

    pytest examples/test_my_worker.py
    pytest examples/test_my_worker.py --chaos-seed=7      # the faults of a run that failed

phalanx is a plug-in of pytest, enabled when it is installed. There are three
layers, from milliseconds to seconds: the logic alone, one death at a chosen moment, chaos. The last
two also check that nothing is left behind. Workers with torch start faster with the fixture
`phalanx_runtime`.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from phalanx import CheckpointPolicy, Executor, Launch, WorkerActor, method

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from phalanx.testing import ChaosRuns

LIMIT = 60.0  # seconds: every wait has an end


class Accounts(WorkerActor):
    """The worker under test: it holds balances, and no deposit may be lost or made twice."""

    def on_start(self, ctx: object) -> None:  # noqa: ARG002
        """Begin with nothing."""
        self.balances: dict[str, int] = {}

    def checkpoint(self) -> dict[str, int]:
        """Return what a new process is to go on from."""
        return self.balances

    def restore(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.balances = state

    @method(idempotent=True)  # sent again after a death, it finds the state from before it
    def deposit(self, name: str, amount: int) -> int:
        """Add *amount* and return the balance."""
        if amount <= 0:
            raise ValueError(f"amount {amount}: give a positive one")
        self.balances[name] = self.balances.get(name, 0) + amount
        return self.balances[name]


def accounts() -> Executor[Accounts]:
    """Return the executor as the program builds it."""
    kept = CheckpointPolicy(every_calls=1)
    return Executor(Accounts, 1, checkpoint=kept, launch=Launch(preload=()))


@pytest.fixture
def group(phalanx_leak_check: None) -> Iterator[Executor[Accounts]]:  # noqa: ARG001
    """One rank. The leak check is asked for first: it looks when the executor has ended."""
    with accounts() as executor:
        yield executor


# 1. The logic: in this process, at once, with breakpoints. Arguments travel as between processes.


def test_deposits_add_up() -> None:
    with Executor(Accounts, 1, launch="inline") as executor:
        executor.proxy().deposit("ann", 2)

        assert executor.proxy().deposit("ann", 3) == 5


def test_a_deposit_of_nothing_is_refused() -> None:
    with (
        Executor(Accounts, 1, launch="inline") as executor,
        pytest.raises(ValueError, match="amount 0: give a positive one"),
    ):
        executor.proxy().deposit("ann", 0)


# 2. One death, at the moment you choose.


def test_a_death_between_two_deposits_costs_nothing(group: Executor[Accounts]) -> None:
    bank = group.proxy(timeout=LIMIT)
    bank.deposit("ann", 2)
    pid = group.ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    assert bank.deposit("ann", 3) == 5
    assert group.status().restarts == 1


def test_a_death_in_a_deposit_does_not_make_it_twice(group: Executor[Accounts]) -> None:
    def deposit_and_die_once(worker: Accounts) -> int:
        balance = worker.deposit("ann", 2)
        if worker.ctx.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # done, and not answered
        return balance

    assert group.call(deposit_and_die_once, LIMIT, rank=0, retries=1) == 2


# 3. Chaos: deaths at any moment, under traffic. phalanx checks its own promises, you check yours.


@pytest.mark.phalanx_chaos(duration=3, rate=2, faults=("kill", "stop", "raise_before"))
@pytest.mark.usefixtures("phalanx_leak_check")
def test_no_fault_loses_or_doubles_a_deposit(phalanx_chaos: ChaosRuns) -> None:
    def traffic(executor: Executor[Accounts], chance: random.Random) -> None:
        name = f"{chance.getrandbits(64):x}"  # several threads run this: each its own account
        for total in (1, 2, 3):
            assert executor.call("deposit", LIMIT, (name, 1), rank=0, retries=9) == total

    phalanx_chaos(lambda: (accounts(), traffic))
