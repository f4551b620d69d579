"""`ZeroPages`: zeros that cost nothing until they are used.

Guarantees: while it is entered, `torch.zeros` of bytes on a CPU returns memory that the kernel
zeroes page by page, when each is touched first; any other call is torch's own.

A worker that replaces another one has no use yet for nearly all of its KV cache, which vLLM fills
with zeros: some tenths of a second for each GiB, and as long again at the next death, since a
process ends only when it has given all its pages back.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ZeroPages(TorchFunctionMode):
    """A context in which zeros are made so."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call *func*, or stand in for it."""
        del types
        given: dict[str, Any] = kwargs or {}
        is_bytes = given == {"dtype": torch.int8, "device": torch.device("cpu")}
        match args:
            case (int(size),) if func is torch.zeros and is_bytes and size > 0:
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=torch.int8)
            case _:
                return func(*args, **given)
