"""The collector as the runtime starts it: by the launcher, under the guardian's eye."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from phalanx.runtime import Runtime, WorkerLabels

LONG = 60.0
LABELS = WorkerLabels(child="root/tp/0", group="tp", rank=0)


def test_a_collector_that_is_killed_is_started_again_by_the_launcher() -> None:
    with Runtime(console=None, stream=False) as runtime:
        output = runtime.collector.open_worker(LABELS)
        first = runtime.collector.pid
        assert first is not None

        os.kill(first, signal.SIGKILL)
        os.write(output.stdout, b"meanwhile\n")
        drained = output.drain(time.monotonic() + LONG)

        assert drained
        assert output.tail().stdout == "meanwhile\n"
        assert runtime.collector.pid != first
        output.close()


def test_closing_the_runtime_ends_the_collector_and_the_stream() -> None:
    with Runtime(console=None) as runtime:
        pid, address = runtime.collector.pid, runtime.collector.address
        assert address is not None
        assert address in Path("/proc/net/unix").read_text()

    assert not Path(f"/proc/{pid}").exists()
    assert address not in Path("/proc/net/unix").read_text()
