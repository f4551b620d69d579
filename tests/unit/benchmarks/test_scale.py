"""What is said of groups by their size, where those of one size break."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from benchmarks import scale


def test_groups_of_a_size_that_breaks_do_not_take_the_figures_of_the_others_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = dict.fromkeys(scale._KINDS, 1.0)

    def measure(ranks: int, calls: int) -> dict[str, float]:
        if ranks == 4:
            raise subprocess.CalledProcessError(1, f"{ranks} ranks, {calls} calls")
        return figures

    monkeypatch.setattr(scale, "measure", measure)
    json_file = tmp_path / "figures"

    code = scale.run(Namespace(json=json_file, ranks=[1, 2, 4], rounds=2, calls=3))

    assert code == 1
    assert json.loads(json_file.read_text())["rounds"] == {
        "1": [figures] * 2,
        "2": [figures] * 2,
        "4": [],
    }
    text = capsys.readouterr().out
    assert "| ready " in text
    assert "4 ranks broke: Command '4 ranks, 3 calls'" in text
    assert "ready: 2 ranks to 1, at most 2" in text
