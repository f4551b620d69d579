"""Clusters whose nodes are local processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from tests.support.node_groups import Cluster

from phalanx.runtime import EventLoop
from phalanx.runtime.process.launcher import Launcher


@pytest.fixture
def cluster_of(loop: EventLoop, launcher: Launcher) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, and closes them in good order."""
    with contextlib.ExitStack() as made:
        yield lambda *words, **options: made.enter_context(
            contextlib.closing(Cluster(loop, launcher, *words, **options))
        )


@pytest.fixture
def cluster(cluster_of: Callable[..., Cluster]) -> Cluster:
    """One node that serves."""
    cluster = cluster_of()
    cluster.open(1)
    return cluster
