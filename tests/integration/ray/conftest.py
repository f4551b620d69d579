"""Groups of nodes on a real Ray; what each test needs of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.support.ray_cluster import RayCluster
from tests.support.ray_groups import RayGroup

from phalanx.runtime import EventLoop
from phalanx.runtime.process.launcher import Launcher


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("ray")
            item.add_marker(pytest.mark.timeout(400))
            if find_spec("ray") is None:
                item.add_marker(pytest.mark.skip(reason="Ray is not installed: make test-cluster"))


@pytest.fixture(scope="session")
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A Ray with two nodes, which each test leaves as they were."""
    with contextlib.closing(RayCluster(tmp_path_factory.mktemp("ray"))) as ray:
        for name in "ab":
            ray.add(name, num_gpus=1)
        yield ray


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., RayCluster]]:
    """Makes a Ray of one's own, with as many nodes; each is called by a letter."""
    with contextlib.ExitStack() as made:

        def make(nodes: int, **environment: str) -> RayCluster:
            ray = made.enter_context(contextlib.closing(RayCluster(tmp_path, **environment)))
            for name in "abc"[:nodes]:
                ray.add(name)
            return ray

        yield make


@pytest.fixture
def group_of(
    loop: EventLoop, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RayGroup]]:
    """Makes groups of nodes on a Ray, and closes them in good order."""
    with contextlib.ExitStack() as made:

        def make(ray: RayCluster, **options: Any) -> RayGroup:
            for name, value in ray.environment.items():
                monkeypatch.setitem(os.environ, name, value)
            group = RayGroup(loop, launcher, ray.address, **options)
            return made.enter_context(contextlib.closing(group))

        yield make
