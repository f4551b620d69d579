"""What a benchmark takes for itself is given back: it adopts what its processes leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.runtime.linux import syscalls


@pytest.fixture(autouse=True)
def _adopts_as_before() -> Iterator[None]:
    before = syscalls.is_subreaper()
    yield
    syscalls.set_subreaper(on=before)
