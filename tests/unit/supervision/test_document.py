"""docs/concepts/supervision.md says what the code does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from tests.support.programs import run_python

ROOT = Path(__file__).parents[3]


def test_the_drawings_are_what_the_code_draws() -> None:
    done = run_python("docs/draw_supervision.py", "--check", cwd=ROOT)  # fmt: skip

    assert done.stdout == "up to date\n", done.stdout + done.stderr


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
