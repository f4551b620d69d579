"""A start that imports much says what `preload` should name."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

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


def write_package(folder: Path, modules: int) -> None:
    """Make a package ``heavy`` in *folder* that imports so many modules."""
    inner = folder / "heavy" / "inner"
    inner.mkdir(parents=True)
    (folder / "heavy" / "__init__.py").write_text("from . import inner")
    names = [f"m{number}" for number in range(modules)]
    (inner / "__init__.py").write_text("".join(f"from . import {name}\n" for name in names))
    for name in names:
        (inner / f"{name}.py").touch()


def test_the_first_start_names_what_it_imports_if_that_is_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Runtime(console="logging", stream=False) as runtime:
        for modules in (20, 120):
            folder = tmp_path / str(modules)
            write_package(folder, modules)
            options: Any = {"launch": Launch(preload=()), "runtime": runtime}
            with Executor(importer(), 2, args=(str(folder),), **options) as executor:
                first = executor.call("pid", timeout=60, rank=0)
                os.kill(first, signal.SIGKILL)
                executor.restart(timeout=60)
                assert executor.call("pid", timeout=60, rank=0) != first

    (told,) = [r for r in caplog.records if "phalanx.start_imports" in r.message]
    assert told.levelno == logging.WARNING
    assert "heavy (122)" in told.message
    assert "preload=" in told.message
