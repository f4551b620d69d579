"""E9: a decoder that is killed while it decodes, and weights that outlive the process.

- After a kill the driver sends prompt and tokens again; the next process feeds them through the
  same CUDA graph, one by one, so that the rest is computed by the same kernels: tokens are equal.
- Weights come from a file that is not in the page cache, from one that is, or from memory of the
  experiment that the rank maps and registers with CUDA.

The decoder has random weights and is made of torch alone.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from phalanx import Executor, Launch, Limits, Runtime, Strategy, WorkerActor
from phalanx.errors import WorkerDied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phalanx import WorkerContext

    from .record import Record

_WORDS, _ROOM = 1024, 512  # size of the vocabulary; longest text
_PROMPT = [1, 2, 3, 5, 8, 13, 21]


class Layer(nn.Module):
    """Attention with a cache of fixed size, and two linear maps."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("keys", torch.zeros(heads, _ROOM, width // heads), persistent=False)
        self.register_buffer("values", torch.zeros(heads, _ROOM, width // heads), persistent=False)

    def forward(self, x: Any, place: Any, mask: Any) -> Any:
        """Return the output for the token at *place*."""
        keys: Any = self.keys
        values: Any = self.values
        query, key, value = self.into(self.norm(x)).view(3, self.heads, 1, -1).unbind(0)
        keys.index_copy_(1, place, key)
        values.index_copy_(1, place, value)
        scores = (query @ keys.transpose(1, 2)) / key.shape[-1] ** 0.5 + mask
        x = x + self.out((scores.softmax(-1) @ values).reshape(1, -1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """One token after the other."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, width), nn.Embedding(_ROOM, width)
        self.layers = nn.ModuleList(Layer(width, max(1, width // 128)) for _ in range(layers))
        self.head = nn.Linear(width, _WORDS)

    def forward(self, token: Any, place: Any) -> Any:
        """Return the most likely token after *token*, which is at *place*."""
        x = self.words(token) + self.places(place)
        reach = torch.arange(_ROOM, device=token.device)
        mask = torch.where(reach <= place, 0.0, float("-inf")).to(x.dtype)
        for layer in self.layers:
            x = layer(x, place, mask)
        return self.head(x).argmax(-1)


def make(size: tuple[int, int], device: str) -> Decoder:
    """Return a decoder."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Decoder(*size).requires_grad_(requires_grad=False)
    finally:
        torch.set_default_dtype(torch.float32)


class Generator(WorkerActor):
    """A rank that decodes.

    Args:
        weights: The file of the parameters, one behind the other.
        pin: Whether to register the mapping with CUDA.
    """

    def __init__(self, size: tuple[int, int], weights: str, *, pin: bool) -> None:
        self._size, self._weights, self._pin = size, weights, pin

    def on_start(self, ctx: WorkerContext) -> None:
        """Load the weights and record the graph."""
        device = ctx.device
        on_gpu = device.startswith("cuda")
        self.model = make(self._size, device)  # CUDA's start is not part of the load
        began = time.monotonic()
        parameters = list(self.model.parameters())
        total = sum(each.numel() for each in parameters)
        stored = torch.from_file(self._weights, shared=True, size=total, dtype=torch.bfloat16)
        pinned = -1
        if self._pin and on_gpu:
            pinned = int(_cudart().cudaHostRegister(stored.data_ptr(), total * 2, 0))
        self.register_seconds = time.monotonic() - began
        at = 0
        for each in parameters:
            part = stored[at : at + each.numel()].view_as(each)
            each.copy_(part, non_blocking=self._pin)
            at += each.numel()
        for layer in self.model.layers:
            for cache in layer.buffers():
                cache.zero_()
        if on_gpu:
            torch.cuda.synchronize()
        self.load_seconds, self.pinned = time.monotonic() - began, pinned == 0
        if pinned == 0:
            _cudart().cudaHostUnregister(stored.data_ptr())
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.graph: Any = None
        self.next = self.model(self.token, self.place)
        if on_gpu:
            self._capture()

    def _capture(self) -> None:
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(3):
                self.model(self.token, self.place)
        cuda.current_stream().wait_stream(side)
        self.graph = cuda.CUDAGraph()
        with cuda.graph(self.graph):
            self.next = self.model(self.token, self.place)

    def decode(self, text: list[int], length: int) -> Iterator[int]:
        """Yield the tokens from the end of *text* up to *length*."""
        token = 0
        for place in range(length):
            token = text[place] if place < len(text) else token
            if place >= len(text):
                yield token
            self.token.fill_(token)
            self.place.fill_(place)
            if self.graph is None:
                self.next = self.model(self.token, self.place)
            else:
                self.graph.replay()
            token = int(self.next)

    def loaded(self) -> tuple[float, float, bool]:
        """Return the seconds to register and to load, and whether the memory was registered."""
        return self.register_seconds, self.load_seconds, self.pinned


def _cudart() -> Any:
    cuda: Any = torch.cuda  # its types are partly unknown
    return cuda.cudart()


def run(record: Record) -> None:
    """Decode undisturbed, then with kills; with weights from each place."""
    size = record.choose((4096, 16), (64, 2))
    length = record.choose(256, 24)
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        disk = Path(folder) / "weights"
        record.set(weight_bytes=_write(disk, size))
        shared = os.memfd_create("lab-weights")
        with disk.open("rb") as source:
            while os.sendfile(shared, source.fileno(), None, 1 << 30):
                pass
        places = {
            "file, not cached": (str(disk), False),
            "file, cached": (str(disk), False),
            "shared memory": (f"/proc/{os.getpid()}/fd/{shared}", False),
            "shared memory, pinned": (f"/proc/{os.getpid()}/fd/{shared}", True),
        }
        expected: list[int] = []
        chance = random.Random(9)
        with Runtime(console=None, stream=False) as runtime:
            for number, (name, (path, pin)) in enumerate(places.items()):
                keep = record.left() * (1 - 1 / (len(places) - number))  # for the places after it
                cold = disk if "not cached" in name else None
                with _executor(record, runtime, size, path, pin=pin, cold=cold) as ex:
                    began = time.monotonic()
                    tokens = list(ex.stream("decode", args=(_PROMPT, length), rank=0))
                    seconds = (time.monotonic() - began) / length
                    expected = expected or tokens
                    record.add("calm", weights=name, equal=tokens == expected, token=seconds)
                    for _ in range(record.choose(5, 1)):
                        if record.left() < keep:
                            break
                        row = _disturbed(ex, expected, length, chance, cold)
                        record.add("kills", weights=name, **row)
        os.close(shared)
    equal = [row["equal"] for row in record.rows("kills")]
    record.set(expected=expected, all_equal=bool(equal) and all(equal))
    for field in ("next_token", "load"):
        record.summarize("kills", field, "weights")


def _write(path: Path, size: tuple[int, int]) -> int:
    """Write random weights; return their bytes."""
    generator: Any = torch.Generator()
    generator.manual_seed(9)
    # The same ones again and again: to draw billions takes longer than there is time for.
    drawn = torch.randn(min(1 << 24, 16 * size[0] ** 2), generator=generator) * size[0] ** -0.5
    block, one = drawn.to(torch.bfloat16), torch.ones(size[0], dtype=torch.bfloat16)
    total = at = 0
    with path.open("wb") as target:
        for name, each in make(size, "meta").named_parameters():  # shapes, no values
            left = each.numel()
            while left:
                source = one if "norm" in name else block[at:]
                part = source[:left]
                total += target.write(part.view(torch.uint8).numpy().data)
                left -= len(part)
                at = (at + len(part)) % len(block)
        target.flush()
        os.fsync(target.fileno())
    return total


def _forget(path: Path) -> None:
    """Take *path* out of the page cache."""
    with path.open("rb") as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _executor(
    record: Record,
    runtime: Runtime,
    size: tuple[int, int],
    path: str,
    *,
    pin: bool,
    cold: Path | None,
) -> Executor[Any]:
    if cold is not None:
        _forget(cold)
    return Executor(
        Generator,
        1,
        args=(size, path),
        kwargs={"pin": pin},
        devices=record.choose("cuda", "cpu"),
        strategy=Strategy.ONE_FOR_ONE,
        intensity=(1000, 60.0),
        limits=Limits(start=120.0),
        launch=Launch(preload=("torch", "benchmarks.gpu.inference")),
        runtime=runtime,
    )


def _disturbed(
    ex: Executor[Any], expected: list[int], length: int, chance: random.Random, cold: Path | None
) -> dict[str, Any]:
    """Kill the rank after some tokens, and go on; return what that cost."""
    text = list(_PROMPT)
    after = chance.randrange(1, len(expected))
    pid = ex.ranks[0].pid
    assert pid is not None
    killed = first = 0.0
    died = False
    while len(text) < length:
        try:
            for token in ex.stream("decode", args=(text, length), rank=0):
                if died and not first:  # what came after the kill may be on its way from before
                    first = time.monotonic() - killed
                text.append(token)
                if not killed and len(text) - len(_PROMPT) >= after:
                    if cold is not None:
                        _forget(cold)
                    killed = time.monotonic()
                    os.kill(pid, signal.SIGKILL)
        except WorkerDied:
            died = True
    register, load, pinned = ex.call("loaded", 60.0, rank=0)
    return {
        "after": after,
        "equal": text[len(_PROMPT) :] == expected,
        "next_token": first or None,
        "register": register,
        "load": load,
        "pinned": pinned,
    }
