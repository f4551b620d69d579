"""xoscar: one actor in each process of a pool, on loopback."""

from __future__ import annotations

import asyncio
import time
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable

xoscar: Any = import_module("xoscar")  # has no types in the environment in which this is checked
# What a variant of a run with deaths asks of the pool.
_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "no recovery": {"auto_recover": False},
    "recover actors": {"auto_recover": "actor"},
    "recover processes": {"auto_recover": "process"},
}


class Echo(protocol.Echo, xoscar.Actor):  # type: ignore[misc]  # its package is elsewhere
    """The same worker, as an actor of xoscar."""


class XoscarActors(protocol.Contestant):
    """A pool, and a loop that runs while a call is made."""

    def open(self, ranks: int, variant: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._run(self._open(ranks, **_VARIANTS[variant]))

    async def _open(self, ranks: int, **options: Any) -> None:
        self._pool: Any = await xoscar.create_actor_pool("127.0.0.1:0", n_process=ranks, **options)
        address = self._pool.external_address
        place = xoscar.allocate_strategy.ProcessIndex
        self._refs: list[Any] = [
            await xoscar.create_actor(
                Echo, address=address, uid=f"rank {rank}", allocate_strategy=place(rank + 1)
            )
            for rank in range(ranks)
        ]

    def close(self) -> None:
        self._run(self._pool.stop())
        self._loop.close()

    def version(self) -> str:
        return version("xoscar")

    def pids(self) -> list[int]:
        return list(self.call("pid"))

    def call(self, method: str, *args: Any) -> Any:
        return self._run(self._call(method, args))

    def many(
        self, method: str, args: tuple[Any, ...], times: int, seconds: float, least: int
    ) -> list[int]:
        # Inside the loop: entering it for each call would be ours, not xoscar's.
        return list(self._run(self._many(method, args, times, seconds, least)))

    async def _many(
        self, method: str, args: tuple[Any, ...], times: int, seconds: float, least: int
    ) -> list[int]:
        clock = time.perf_counter_ns
        until = clock() + int(seconds * 1e9)
        spent: list[int] = []
        while len(spent) < times:
            began = clock()
            await self._call(method, args)
            now = clock()
            spent.append(now - began)
            if now > until and len(spent) >= least:
                break
        return spent

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return await asyncio.gather(*(getattr(ref, method)(*args) for ref in self._refs))

    def pipeline(self, times: int, window: int) -> None:
        self._run(self._pipeline(times, window))

    async def _pipeline(self, times: int, window: int) -> None:
        left = iter(range(times))

        async def lane() -> None:
            for _ in left:
                await self._call("nothing", ())

        await asyncio.gather(*(lane() for _ in range(window)))

    def slow(self, seconds: float, notes: str) -> list[str]:
        return [str(answer) for answer in self._run(self._call("slow", (seconds, notes)))]

    def works(self, timeout: float) -> None:
        self._run(xoscar.wait_for(self._call("nothing", ()), timeout))

    def _run(self, what: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(what)


def make() -> XoscarActors:
    """Return the contestant."""
    return XoscarActors()
