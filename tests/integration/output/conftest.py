"""A terminal, a collector that writes to it, and workers of that collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.support.output import Console, Worker, labels_of

from phalanx.runtime.output.collector_client import OutputCollector, WorkerOutput
from phalanx.runtime.process.launcher import Launcher


@pytest.fixture
def console() -> Iterator[Console]:
    console = Console()
    yield console
    console.close()


@pytest.fixture
def collector(console: Console, launcher: Launcher) -> Iterator[OutputCollector]:
    """A collector that shows everything on `console` as JSON."""
    with OutputCollector(
        launcher, console="json", level="debug", out=console.fd, err=console.fd
    ) as collector:
        yield collector


@pytest.fixture
def worker(collector: OutputCollector) -> Iterator[Callable[[str], tuple[Worker, WorkerOutput]]]:
    """Start a worker of `collector` that runs some code; what still runs at the end is killed."""
    started: list[tuple[Worker, WorkerOutput]] = []

    def start(code: str) -> tuple[Worker, WorkerOutput]:
        output = collector.open_worker(labels_of(len(started)))
        started.append((Worker(output, code), output))
        return started[-1]

    yield start
    for one, output in started:
        if one.is_running():
            one.kill()
        one.wait()  # also where it had ended by itself: its stdin is still open here
        output.close()
