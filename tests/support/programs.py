"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_program(
    words: Sequence[str], *, timeout: float = 100.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Return the program's end, with what it has written."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def run_python(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, *words], **options)
