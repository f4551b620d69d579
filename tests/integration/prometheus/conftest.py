"""A driver whose metrics are served: a tree with a group of two ranks."""

from __future__ import annotations

import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.workers import Echo

from phalanx import Runtime, Supervisor, SupervisorSpec, executor_child
from phalanx.integrations.prometheus import MetricsServer

GROUP = "root/model"


def get(url: str, **headers: str) -> tuple[int, str]:
    """Return status and text of what *url* answers."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=20
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Served:
    def __init__(self, metrics: MetricsServer, name: str) -> None:
        self.url = metrics.url
        self.metrics = metrics
        self.name = name
        self.model: Any = None

    def get(self, path: str) -> tuple[int, str]:
        return get(self.url + path)

    def value(self, series: str) -> float | None:
        """Return the value of *series*, labels included, as it is written."""
        lines = self.get("/metrics")[1].splitlines()
        found = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == series]
        return float(found[0]) if found else None


@pytest.fixture
def served() -> Iterator[Served]:
    name = f"metrics-{uuid.uuid4().hex[:8]}"
    with MetricsServer(0) as metrics, Runtime(console=None, name=name) as runtime:
        child = executor_child("model", Echo, 2, launch={"preload": ()}, runtime=runtime)
        with Supervisor(SupervisorSpec(id="root", children=[child])) as tree:
            served = Served(metrics, name)
            served.model = tree.child("model")
            yield served
