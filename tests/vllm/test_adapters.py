"""Adapters (LoRA) are there again after a death, and one whose files are gone ends nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(1600)
def test_requests_with_adapters_are_continued_with_them(
    said_by: Callable[..., dict[str, Any]],
) -> None:
    said = said_by("adapters.py")

    assert said["added"] == [True] * 3
    assert said["right"][0] != said["right"][1]
    assert said["killed"] == said["without_files"] == said["right"]
    assert said["listed"] == [1, 2, 3]
    assert said["left"] == [1, 2]
