"""All runs are forked from one process, which has imported torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.training_workers import Replicated

from phalanx.integrations.torch import Training
from phalanx.runtime import acquire_shared, release_shared


@pytest.fixture(autouse=True, scope="package")
def _runtime() -> Iterator[None]:
    """Keep what executors share, so that no test seems to leave it."""
    shared = acquire_shared()
    try:
        Training(Replicated, 1, threads=1).close()
        yield
    finally:
        release_shared(shared)
