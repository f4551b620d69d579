"""One quiet runtime for the tests of executors: its zygote has imported nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.actors.workers import Echo

from phalanx.actors import Executor
from phalanx.runtime import Runtime


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    with Runtime(console=None, stream=False) as runtime:
        runtime.launcher(()).warm()
        _ = runtime.scribe
        yield runtime


@pytest.fixture
def make(runtime: Runtime) -> Iterator[Callable[..., Executor[Any]]]:
    """Builds executors and closes them."""
    made: list[Executor[Any]] = []

    def build(worker: Any = Echo, world_size: int | None = 2, **options: Any) -> Executor[Any]:
        options = {"preload": (), "runtime": runtime, "start_timeout": 30.0, **options}
        executor: Executor[Any] = Executor(worker, world_size, **options)
        made.append(executor)
        return executor

    yield build
    for executor in made:
        executor.close()
