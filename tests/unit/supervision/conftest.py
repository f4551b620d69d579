"""What tests of supervision are given."""

from __future__ import annotations

from collections.abc import Iterator

import pykka
import pytest
from tests.support.supervised_actors import Notices


@pytest.fixture
def notices() -> Notices:
    return Notices()


@pytest.fixture(autouse=True)
def no_actor_left() -> Iterator[None]:
    yield
    assert pykka.ActorRegistry.get_all() == []
