"""The form of the console: as the program says, else as the environment does."""

from __future__ import annotations

import json
import sys

import pytest

from phalanx.actors import Executor, Launch, WorkerActor
from phalanx.runtime import Runtime
from phalanx.supervision import SpecError


class Talker(WorkerActor):
    def talk(self) -> None:
        print("a line", file=sys.stderr)
        self.ctx.log.info("step.done", loss=0.5)


def shown(capfd: pytest.CaptureFixture[str], runtime: Runtime | None = None) -> str:
    with Executor(Talker, 1, name="talk", launch=Launch(preload=()), runtime=runtime) as executor:
        executor.call("talk", timeout=60, rank=0)
    return capfd.readouterr().err


def test_the_environment_says_the_form_unless_the_program_does(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_CONSOLE", "json")
    monkeypatch.setenv("PHALANX_LOG_LEVEL", "info")

    records = [json.loads(line) for line in shown(capfd).splitlines()]
    with Runtime(console="text", level="warning", stream=False) as runtime:
        text = shown(capfd, runtime)
    text += capfd.readouterr().err  # what the runtime shows at its close

    assert any(record.get("text") == "a line" for record in records)
    assert any(
        (record.get("event"), record.get("loss")) == ("step.done", 0.5) for record in records
    )
    assert "] a line" in text
    assert "step.done" not in text
    monkeypatch.setenv("PHALANX_CONSOLE", "none")
    assert shown(capfd) == ""


@pytest.mark.parametrize(
    ("variable", "field", "value"),
    [("PHALANX_CONSOLE", "console", "html"), ("PHALANX_LOG_LEVEL", "level", "loud")],
)
def test_a_form_that_makes_no_sense_is_refused_before_anything_starts(
    variable: str, field: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=f"{field}='{value}'"):
        Runtime(**{field: value})  # type: ignore[arg-type]
    monkeypatch.setenv(variable, value)
    with pytest.raises(SpecError, match=f"{variable}='{value}'"):
        Executor(Talker, 1)
    with pytest.raises(SpecError, match=f"{variable}='{value}'"):
        Runtime()
