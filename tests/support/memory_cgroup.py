"""A control group with little memory, on machines where one can be made."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest


@contextlib.contextmanager
def limited_group(limit: int) -> Generator[Path]:
    """Make a group that may have *limit* bytes, and take it away; skips the test where none can."""
    found = _memory_group()
    if found is None:
        pytest.skip("no memory control group that may be divided")
    above, name = found
    group = above / f"phalanx-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def _memory_group() -> tuple[Path, str] | None:
    """Return a folder in which memory can be limited, and the name of the limit."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
    for _, controllers, path in lines:
        folder = Path("/sys/fs/cgroup") / path.lstrip("/")
        able = folder / "cgroup.subtree_control"
        if not controllers and able.exists() and "memory" in able.read_text().split():
            return folder, "memory.max"
    return None
