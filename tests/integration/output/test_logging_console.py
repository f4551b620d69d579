"""Console ``"logging"``: output and events reach the standard library's `logging` in the driver."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.actors import Executor, Launch, WorkerActor
from phalanx.runtime import Runtime
from phalanx.runtime.output.logging_console import LoggingConsole
from phalanx.supervision import WorkerDied


class Talker(WorkerActor):
    def talk(self) -> None:
        print("a line")
        print("an error", file=sys.stderr)
        self.ctx.log.warning("step.done", loss=0.5)
        logging.getLogger("mine").error("of the \x1b[31mstandard library")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run(**options: Any) -> None:
    with (
        Runtime(console="logging", stream=False, **options) as runtime,
        Executor(Talker, 1, name="talk", launch=Launch(preload=()), runtime=runtime) as executor,
    ):
        executor.call("talk", timeout=60, rank=0)
        with pytest.raises(WorkerDied):
            executor.call("die", timeout=60, rank=0)


def test_output_records_and_events_are_records_of_logging(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        run()

    found = {(r.name, r.levelname, r.message.partition("] ")[2]) for r in caplog.records}
    assert ("phalanx.worker.stdout", "INFO", "a line") in found
    assert ("phalanx.worker.stderr", "INFO", "an error") in found
    assert ("phalanx.worker", "WARNING", "step.done loss=0.5") in found
    crash = next(r for r in caplog.records if "phalanx.worker_crashed" in r.message)
    assert (crash.name, crash.levelname) == ("phalanx", "ERROR")
    assert crash.phalanx["report"]["rank"] == 0  # type: ignore[attr-defined]
    assert "killed (SIGKILL)" in crash.message
    assert not any("\x1b" in record.message for record in caplog.records)
    assert capfd.readouterr().out == ""  # nothing is shown twice


def test_it_reaches_a_stream_that_has_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stderr", notebook)
    handler = logging.StreamHandler()  # as of a notebook's kernel: on sys.stderr as it is now
    logging.getLogger("phalanx").addHandler(handler)
    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", False)
    try:
        logging.getLogger("phalanx.worker.stdout").setLevel(logging.INFO)
        run()
    finally:
        logging.getLogger("phalanx").removeHandler(handler)
        logging.getLogger("phalanx.worker.stdout").setLevel(logging.NOTSET)

    assert "a line" in notebook.getvalue()
    assert "phalanx.worker_crashed" in notebook.getvalue()


def test_one_that_gets_no_thread_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            LoggingConsole()

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_filter_that_raises_ends_no_output(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        if record.name == "phalanx.worker.stdout":
            raise ValueError("a filter of the program")
        return True

    caplog.handler.addFilter(refuse)
    try:
        with caplog.at_level(logging.INFO):
            run(level="error")
    finally:
        caplog.handler.removeFilter(refuse)

    assert [r.levelname for r in caplog.records if r.name == "phalanx"] == ["ERROR"]
    assert "an error" in caplog.text
