"""docs/concepts/supervision.md says what the code does."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_drawings_are_what_the_code_draws() -> None:
    draw = runpy.run_path(str(ROOT / "docs/draw_supervision.py"))
    text = draw["DOCUMENT"].read_text()

    assert draw["written"](text) == text


def test_every_clause_named_beside_otp_exists() -> None:
    text = (ROOT / "docs/concepts/supervision.md").read_text()
    table = text[text.index("## OTP beside the code") :]

    names = re.findall(r"`((?:SupervisorMachine\.|RestartWindow\.|verdict)\w*)`", table)

    assert len(names) >= 12
    for path in names:
        module = "restart_rules" if path.startswith("RestartWindow") else "machine"
        found: object = importlib.import_module(f"phalanx.supervision.core.{module}")
        for part in path.split("."):
            found = getattr(found, part)
