"""The end of a run that is wanted early: what only starts is not waited for.

Guarantees: once the run is to end, a rank that is starting is killed, however long its ``on_start``
would take; nobody who serves is touched.

Left to others: what then comes of the start, and the end of those that serve (`session`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from .striker import process_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from .recorder import Watched

_LOOK = 0.05


@contextlib.contextmanager
def hastened(
    interrupt: threading.Event, groups: Callable[[], list[Watched]]
) -> Generator[None, None, None]:
    """In here no start of *groups* is waited for once *interrupt* is set."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK):
            if interrupt.is_set():
                _kill_starting(groups())

    if interrupt.is_set():
        _kill_starting(groups())
    watch = threading.Thread(target=look, name="chaos-haste", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def kill_ranks(groups: list[Watched]) -> None:
    """Kill all that *groups* have."""
    for group in groups:
        for info in group.shared.view.ranks:
            _kill(group, info.rank)


def _kill_starting(groups: list[Watched]) -> None:
    for group in groups:
        for info in group.shared.view.ranks:
            if info.state == "starting":
                _kill(group, info.rank)


def _kill(group: Watched, rank: int) -> None:
    part = process_of(group, rank)
    if part is not None:
        part.send(signal.SIGKILL)
