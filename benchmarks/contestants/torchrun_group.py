"""torchrun: an agent that restarts all ranks of a program when one dies. It makes no calls.

What is asked of the others, an empty call to all, is here a step of the program: one all-reduce.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

from .protocol import Contestant, beside


class TorchrunGroup(Contestant):
    """An agent, and the notes of its ranks."""

    def open(self, ranks: int, variant: str) -> None:
        self._begin_notes(ranks)
        self._agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={ranks}", "--max-restarts=10", "--monitor-interval=0.1"),
                *("-m", "phalanx_peers.torchrun_rank", self._notes, variant),
            ],
            stdout=sys.stderr,
        )

    def close(self) -> None:
        self._agent.terminate()
        self._agent.wait(30)
        os.unlink(self._notes)  # noqa: PTH108  # as it was made

    def version(self) -> str:
        return version("torch")

    def driver(self) -> int:
        return self._agent.pid

    def pids(self) -> list[int]:
        return [self._steps()[rank][0] for rank in range(self._ranks)]

    def slow(self, seconds: float, notes: str) -> list[str]:
        """Return when the ranks were replaced: the step of the old ones is lost."""
        del notes, seconds
        before = self.pids()
        while self.pids() == before and self._agent.poll() is None:
            time.sleep(0.01)
        message = "nobody calls: the step is lost, and every rank begins anew"
        raise RuntimeError(message)

    def works(self, timeout: float) -> None:
        asked = time.monotonic()
        while True:
            steps = self._steps()
            fresh = sum(at > asked for _, at in steps.values())
            if fresh == self._ranks:
                return
            if self._agent.poll() is not None:
                message = f"torchrun has ended with exit code {self._agent.returncode}"
                raise RuntimeError(message)
            if time.monotonic() > asked + timeout:
                message = f"{fresh} of {self._ranks} ranks have made a step in {timeout:g} s"
                raise TimeoutError(message)
            time.sleep(0.005)

    def _begin_notes(self, ranks: int) -> None:
        self._ranks = ranks
        handle, self._notes = tempfile.mkstemp(dir=beside())
        self._file, self._rest = os.fdopen(handle, "rb"), b""
        self._last: dict[int, tuple[int, float]] = {}

    def _steps(self) -> dict[int, tuple[int, float]]:
        """Return the process and the moment of each rank's last step."""
        # What is new: to read all again would take processor time from the ranks that come back.
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            _, rank, pid, at = line.split()
            self._last[int(rank)] = int(pid), float(at)
        return self._last


def make() -> TorchrunGroup:
    """Return the contestant."""
    return TorchrunGroup()
