"""A start that imports much says what `preload` should name."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from phalanx.actors import Executor, Launch, WorkerActor, WorkerContext
from phalanx.runtime import Runtime


def importer() -> type[WorkerActor]:
    class Importer(WorkerActor):
        """Local, so that it travels by value: its process does not import pytest."""

        def __init__(self, folder: str) -> None:
            sys.path.insert(0, folder)

        def on_start(self, ctx: WorkerContext) -> None:
            __import__("heavy")

        def pid(self) -> int:
            return os.getpid()

    return Importer


@pytest.mark.parametrize(("modules", "told"), [(120, 1), (20, 0)])
def test_the_first_start_names_what_it_imports_if_that_is_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, modules: int, told: int
) -> None:
    inner = tmp_path / "heavy" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "heavy" / "__init__.py").write_text("from . import inner")
    (inner / "__init__.py").write_text(
        "".join(f"from . import m{number}\n" for number in range(modules))
    )
    for number in range(modules):
        (inner / f"m{number}.py").touch()

    with (
        Runtime(console="logging", stream=False) as runtime,
        Executor(
            importer(), 2, args=(str(tmp_path),), launch=Launch(preload=()), runtime=runtime
        ) as executor,
    ):
        first = executor.call("pid", timeout=60, rank=0)
        os.kill(first, signal.SIGKILL)
        executor.restart(timeout=60)
        assert executor.call("pid", timeout=60, rank=0) != first

    told_of = [r for r in caplog.records if "phalanx.start_imports" in r.message]
    assert len(told_of) == told
    for record in told_of:
        assert record.levelno == logging.WARNING
        assert f"heavy ({modules + 2})" in record.message
        assert "preload=" in record.message
