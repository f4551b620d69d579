"""What wakes a task of asyncio from any thread."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


def waker(loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> Callable[[], None]:
    """Return what has *arrived* done on any thread; it does nothing once *loop* is closed."""

    def tell() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def wake() -> None:
        # Asked first, it might be closed in between; and the error would strike whoever settles.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell)

    return wake
