"""What is done with each system: its steady cost, a run with kills, and the run without."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from .figures import Found, digest_at, evaluate
from .systems import SYSTEMS, GaveUp, Run, undisturbed, unprotected

if TYPE_CHECKING:
    import argparse

    from benchmarks.harness.venvs import Environments

    from .systems import System

_WARM = 10  # steps before anything counts


class Measurement:
    """All systems with one number of ranks.

    Args:
        ranks: How many.
        asked: The command line.
        environments: Where peers are.

    Attributes:
        found: Of each system that has begun.
    """

    def __init__(self, ranks: int, asked: argparse.Namespace, environments: Environments) -> None:
        self._asked = asked
        self._environments = environments
        self._sizes = {"ranks": ranks, "width": asked.width, "layers": asked.layers}
        self.found: list[Found] = []

    def run(self) -> None:
        """Measure the systems that are asked for."""
        chosen = [SYSTEMS[name] for name in self._asked.form or SYSTEMS]
        for system in chosen:
            self._one(system)
        for trains in dict.fromkeys(system.trains for system in chosen):
            alike = [
                each
                for each in self.found
                if SYSTEMS[each.system].trains == trains and each.last and not each.why
            ]
            if alike:
                self._compare(undisturbed(SYSTEMS[alike[0].system]), alike)

    def _one(self, system: System) -> None:
        found = Found(system.name, self._sizes["ranks"])
        self.found.append(found)
        say(found, "steady cost")
        try:
            found.overhead = self._overhead(system)
            say(found, "kills")
            self._disturb(system, found)
            say(found, json.dumps(asdict(found)))  # what a run that is ended later has found
        except Exception as error:  # noqa: BLE001  # the other systems go on
            found.why = _reason(error) + (f" (after {found.kills} kills)" if found.kills else "")
            say(found, found.why)

    def _start(self, system: System, **asked: object) -> Run:
        if system.is_driven:
            system = system.with_options(every=self._asked.every)
        if system.peer == "nvrx":
            system = system.with_options(reserves=self._asked.reserves)
        return Run(system, self._sizes, self._asked.patience, self._environments, **asked)

    def _overhead(self, system: System) -> list[float]:
        """Do blocks of steps with protection and without, in turns; return what it adds."""
        if self._asked.rounds < 1:
            return []
        with ExitStack() as stack:
            runs = [
                stack.enter_context(self._start(each, gated=True, block=self._asked.block))
                for each in (system, unprotected(system))
            ]
            pair = [run.blocks() for run in runs]
            shares = list[float]()
            for number in range(self._asked.rounds + 1):
                order = (0, 1) if number % 2 else (1, 0)
                taken = {which: next(pair[which]) for which in order}
                if number:  # the first makes buffers and optimizer states
                    shares.append(taken[0] / taken[1] - 1)
        return shares

    def _disturb(self, system: System, found: Found) -> None:
        """Train for the time asked, while ranks are killed."""
        asked, chance = self._asked, random.Random(self._asked.seed)
        killed = list[float]()
        with self._start(system) as run:
            run.wait_steps(_WARM)
            run.pass_time(time.monotonic() + asked.calm)
            began = time.monotonic()
            ended = began + asked.seconds
            try:
                for number in range(1, round(asked.seconds / asked.cadence)):
                    run.pass_time(began + asked.cadence * number)
                    pid = run.newest(chance.randrange(found.ranks))
                    if pid is not None:  # else it has not come back yet
                        with suppress(ProcessLookupError):
                            at = time.monotonic()
                            os.kill(pid, signal.SIGKILL)
                            killed.append(at)
                run.pass_time(ended)
                run.asked.stop_file.touch()
                run.finish()
            finally:
                ended = min(ended, time.monotonic())
                evaluate(found, run.seen, killed, began, ended)
            found.digest = digest_at(run.seen, found.last)

    def _compare(self, system: System, alike: list[Found]) -> None:
        """Train undisturbed for as many steps, and compare the hashes."""
        steps = sorted({each.last for each in alike})
        say(alike[0], f"undisturbed, {steps[-1]} steps")
        try:
            with self._start(system, digests=tuple(steps)) as run:
                notes = run.finish()
        except Exception as error:  # noqa: BLE001  # as above
            for each in alike:
                each.why = f"undisturbed: {_reason(error)}"
            return
        for each in alike:
            each.equal = each.digest is not None and each.digest == digest_at(notes, each.last)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, GaveUp) else f"broke: {error!r}"


def say(found: Found, what: str) -> None:
    """Say how far it is."""
    print(f"{found.ranks} ranks, {found.system}: {what}", file=sys.stderr, flush=True)
