"""Drivers in processes of their own, for tests that end them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import LONG, Lines, soon

from phalanx.runtime.linux import process_tree as tree
from phalanx.runtime.linux import procfs

ROOT = Path(__file__).parents[2]
AT_MOST = 5.0  # seconds after which nothing of a killed driver's tree may live: a contract


class Driver:
    """One run of a *module* of this folder, all of whose processes carry a mark of ours."""

    def __init__(self, module: str, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", f"tests.support.{module}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PHALANX_TEST_MARK": self.mark},
            cwd=ROOT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._lines = Lines(self.process.stdout.fileno())
        self.said: list[dict[str, Any]] = []

    def receive(self) -> dict[str, Any]:
        """Return the next thing that it says."""
        deadline = soon()
        while True:
            line = self._lines.next(deadline, lambda: f"{self.said}; {self._errors()}")
            with contextlib.suppress(ValueError):  # else a worker's own words
                self.said.append(json.loads(line))
                return self.said[-1]

    def expect(self, key: str) -> Any:
        """Return the value of the next line that has *key*."""
        while key not in (said := self.receive()):
            pass
        return said[key]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(LONG)
        self.stderr = self._errors()
        return code

    def left(self) -> dict[int, procfs.Task]:
        return tree.find(tree.TreeTarget(self.mark.encode()))[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LONG)  # what it wrote may never end: a child may hold its descriptors

    def assert_gone(self, *but: int) -> None:
        """Wait until nothing of the tree lives, as long as the contract allows."""
        deadline = time.monotonic() + AT_MOST
        while (left := self.left().keys() - but) and time.monotonic() < deadline:
            time.sleep(0.02)
        named = {pid: procfs.command(pid) for pid in left}
        assert not left, f"still there after {AT_MOST} s: {named}"

    def _errors(self) -> str:
        assert self.process.stderr is not None
        if self.process.poll() is None:
            return ""
        return self.process.stderr.read().decode(errors="replace")

    def close(self) -> None:
        try:
            if self.process.poll() is not None:
                self.assert_gone()
        finally:
            self.process.kill()
            self.process.wait(LONG)
            tree.kill(tree.TreeTarget(self.mark.encode()), soon())
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            self.process.stdout.close()
            self.process.stderr.close()
