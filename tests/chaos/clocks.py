"""What tests do to clocks: have the wall clock jump, and have the product live by it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from phalanx.chaos.wall_clock import put_wall_clock

PRODUCT = ("phalanx.supervision", "phalanx.runtime", "phalanx.actors")


class WrongTime:
    """The module `time`, but for its monotonic clock, which is the wall clock."""

    def __init__(self) -> None:
        self._between = time.monotonic() - time.time()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.time() + self._between

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)


def live_by_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """Have the product, in this process, take the wall clock wherever it asks for the other."""
    wrong = WrongTime()
    for name, module in list(sys.modules.items()):
        if name.startswith(PRODUCT) and vars(module).get("time") is time:
            patch.setattr(module, "time", wrong)


@contextlib.contextmanager
def jumping(*, right: bool = True) -> Generator[Callable[[float], None]]:
    """Give what has the wall clock of this process jump, to so many seconds off.

    Args:
        right: Whether the product is as it is; otherwise it lives by the wall clock.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not right:
            live_by_the_wall_clock(patch)
        try:
            yield put_wall_clock
        finally:
            put_wall_clock(0.0)
