"""Samples and random numbers as pure functions of (seed, step, rank).

- Every sample is used exactly once in an epoch (a multiple of the global batch), in an order that
  depends on the seed and on the number of the epoch alone.
- Nothing is kept between steps, so that any step can be done again, in any process.
"""

from __future__ import annotations

import hashlib
import random
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError, check_count

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROUNDS = 6  # of the Feistel network; four make a strong permutation, and these are cheap


def step_seed(seed: int, step: int, rank: int, stream: int = 0) -> int:
    """Return a seed in [0, 2**63) for *step* on *rank*; each *stream* has another."""
    text = f"{seed}/{step}/{rank}/{stream}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_step(seed: int, step: int, rank: int, generators: Iterable[Any] = ()) -> None:
    """Seed torch on all devices, `random`, NumPy where it is imported, and *generators*."""
    torch: Any = import_module("torch")  # the sampler is of use without it
    # With no device torch.manual_seed keeps a trace of its caller for one that may come.
    seed_torch = torch.manual_seed if _has_device() else torch.default_generator.manual_seed
    seed_torch(step_seed(seed, step, rank))
    random.seed(step_seed(seed, step, rank, 1))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(step_seed(seed, step, rank, 2) & 0xFFFFFFFF)
    for number, generator in enumerate(generators, 3):
        generator.manual_seed(step_seed(seed, step, rank, number))


@cache
def _has_device() -> bool:
    torch: Any = import_module("torch")
    return bool(torch.accelerator.is_available())


def sample_indices(
    seed: int, step: int, rank: int, *, world_size: int, batch: int, samples: int
) -> list[int]:
    """Return the *batch* samples that *rank* uses in *step* (1 for the first).

    An epoch has ``samples // (world_size * batch)`` steps; the samples that are left over differ
    from epoch to epoch.

    Args:
        seed: Of the order.
        step: 1 for the first.
        rank: Of *world_size*.
        world_size: How many ranks there are.
        batch: Samples per rank and step.
        samples: How many there are; a sample is a number below it.

    Raises:
        SpecError: one of them is out of its range.
    """
    check_count("step", step)
    check_count("batch", batch)
    check_count("world_size", world_size)
    if not 0 <= rank < world_size:
        raise SpecError("rank", rank, f"there are {world_size}: give one from 0 on below that")
    together = world_size * batch
    if samples < together:
        raise SpecError("samples", samples, f"one step of {world_size} ranks uses {together}")
    epoch, position = divmod(step - 1, samples // together)
    first = position * together + rank * batch
    key = step_seed(seed, epoch, 0, 1 << 20)
    return [_permuted(first + i, samples, key) for i in range(batch)]


def _permuted(index: int, count: int, key: int) -> int:
    """Return where a permutation of ``range(count)`` takes *index*: no list of them is made.

    A Feistel network over the next power of four, walked until it lands inside.
    """
    bits = max(1, (count - 1).bit_length() + 1 >> 1)
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for number in range(_ROUNDS):
            mixed = (right * 0x9E3779B97F4A7C15 + key + number * 0xBF58476D1CE4E5B9) & _WORD
            mixed = ((mixed ^ (mixed >> 29)) * 0x94D049BB133111EB) & _WORD
            left, right = right, left ^ ((mixed >> 32) & mask)
        index = left << bits | right
        if index < count:
            return index


_WORD = (1 << 64) - 1
