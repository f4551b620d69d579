"""A text generator behind HTTP: streams that continue after a kill, health, a drain at SIGTERM.

The ranks share a process group; each holds the n-grams of its part of Python's documentation. One
call to all ranks makes the next letter of all requests; a call interrupted by a death is resent.

    python examples/serve_fastapi.py
    curl -N 'localhost:8000/generate?prompt=The+class&length=300&seed=7'
    curl localhost:8000/health      # with the processes of the ranks: kill -9 one during a stream
"""

import argparse
import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import StreamingResponse

from phalanx import Executor, Intensity, PhalanxError, WorkerActor, WorkerContext, method

ORDERS = (6, 4, 2, 1, 0)  # letters that are looked back on; the first that is known decides
CLIENTS = 256  # at once; further ones are refused, so that none waits for long


class NGrams(WorkerActor):
    """One part of the text."""

    def on_start(self, ctx: WorkerContext) -> None:
        """Join the process group, and count what follows what."""
        ctx.init_process_group("gloo")
        self.follow = defaultdict[str, Counter[int]](Counter)
        for text in list(topics.values())[ctx.rank : 24 : ctx.world_size]:
            for order in ORDERS:
                for end, letter in enumerate(text[order:].encode("ascii", "replace"), order):
                    self.follow[text[end - order : end]][letter] += 1

    @method(idempotent=True, reply=0)  # a death sends the call again
    def step(self, texts: list[str], draws: list[float]) -> list[str]:
        """Return the letter after each of *texts*, chosen by *draws* of 0 to 1."""
        import torch  # noqa: PLC0415  # needed in the ranks only

        counts = torch.zeros(len(texts), len(ORDERS), 128)
        for row, text in zip(counts, texts, strict=True):
            for column, order in zip(row, ORDERS, strict=True):
                if known := self.follow.get(text[len(text) - order :]):
                    column[list(known)] = torch.tensor([*known.values()], dtype=torch.float)
        torch.distributed.all_reduce(counts)  # pyright: ignore[reportUnknownMemberType]  # torch's gap
        best = [next(each for each in row if each.any()) for row in counts]
        ends = [each.cumsum(0) > draw * each.sum() for each, draw in zip(best, draws, strict=True)]
        return [chr(int(each.nonzero()[0])) for each in ends]


@dataclass(eq=False)
class Request:
    """A request under way; *events* are what its client gets."""

    text: str
    left: int
    chance: random.Random
    events: asyncio.Queue[str] = field(default_factory=asyncio.Queue[str])


requests, arrived = set[Request](), asyncio.Event()  # those under way; there are some


async def make_letters(group: Executor[NGrams]) -> None:
    """Make the next letter of all requests with one call, again and again."""
    model = group.proxy(timeout=60.0, retries=3)
    while await arrived.wait():
        batch = [*requests]
        texts, draws = [each.text for each in batch], [each.chance.random() for each in batch]
        try:
            for request, letter in zip(batch, await model.step.aio(texts, draws), strict=True):
                request.text, request.left = request.text + letter, request.left - 1
                request.events.put_nowait(f"data: {json.dumps(letter)}\n\n")
                if request.left == 0:
                    request.events.put_nowait("event: done\ndata:\n\n")
                    requests.discard(request)
        except Exception as error:  # noqa: BLE001  # the clients get it, whatever it is
            for request in batch:
                request.events.put_nowait(f"event: error\ndata: {json.dumps(str(error))}\n\n")
                requests.discard(request)
        if not requests:
            arrived.clear()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Start the group before the first request, and end it after the last."""
    ranks, restarts = app.state.options.ranks, app.state.options.restarts
    with Executor(NGrams, ranks, intensity=Intensity(restarts, 60.0)) as app.state.group:
        letters = asyncio.create_task(make_letters(app.state.group))
        yield
        letters.cancel()


app = FastAPI(lifespan=lifespan)


@app.get("/generate")
async def generate(
    prompt: str, length: Annotated[int, Query(ge=1, le=5000)] = 200, seed: int = 0
) -> StreamingResponse:
    """Stream *length* letters that follow *prompt*; the same ones for the same *seed*."""
    if len(requests) >= CLIENTS:
        raise HTTPException(503, "too many requests; try again", {"Retry-After": "1"})
    request = Request(prompt, length, random.Random(seed))

    async def stream() -> AsyncGenerator[str]:
        requests.add(request)
        arrived.set()
        try:
            event = ""
            while not event.startswith("event"):  # the last one
                event = await request.events.get()
                yield event
        finally:
            requests.discard(request)  # a client that has gone costs nothing further

    return StreamingResponse(stream(), media_type="text/event-stream")


@app.get("/health")
async def health() -> Any:
    """Return 200 if every rank answers within 5 seconds, after a restart if need be; else 503."""
    group: Executor[NGrams] = app.state.group
    try:
        await group.aio.check_health(5.0)
    except PhalanxError as error:
        raise HTTPException(503, str(error)) from error
    pids, restarts = [each.pid for each in group.ranks], group.status().restarts
    return {"pids": pids, "restarts": restarts, "streams": len(requests)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a text generator over HTTP.")
    for name, default in (("host", "127.0.0.1"), ("port", 8000), ("ranks", 2), ("restarts", 5)):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{default}")
    app.state.options = options = parser.parse_args()
    for name, least, most in (("port", 0, 65535), ("ranks", 1, 24), ("restarts", 0, 1000)):
        if not least <= (value := getattr(options, name)) <= most:
            parser.error(f"--{name} {value}: give {least} to {most}")
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=30)  # SIGTERM
