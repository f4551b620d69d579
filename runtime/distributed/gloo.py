"""Aborts gloo groups: what waits in one gets its error at once, here and on the other ranks.

gloo closes its connections when the last reference to a group is gone. A worker that keeps one of
its own (the group, a module that was given it, the handle of an operation, a thread that is in one)
would hold up every rank that waits for it until the group's timeout, 30 minutes by default; torch
has no call that ends them (``shutdown`` and ``abort`` do nothing in gloo 2.13). But an operation
whose own timeout is over closes every connection of its group, so a group is aborted by one of a
millisecond.

One thing gloo does not do: a thread in the middle of a message, to or from another rank, gets no
error (`Pair::signalException`). It waits until the group's timeout, and so does what frees the
group (`free_groups` does that on a separate thread).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from datetime import timedelta
from importlib import import_module
from typing import Any

_AT_ONCE = timedelta(milliseconds=1)
_TAG = (1 << 31) - 1  # of a message that no rank sends


def abort_gloo_groups() -> list[Any]:
    """Close all connections of the gloo groups that this process is in; return its groups."""
    if "torch.distributed" not in sys.modules:
        return []
    torch: Any = import_module("torch")
    if not torch.distributed.is_available():
        return []
    groups = list(torch.distributed.distributed_c10d._world.pg_map)  # noqa: SLF001  # there is no other way
    for group in groups:
        with contextlib.suppress(Exception):  # it raises that the time is over, or is not gloo's
            backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001  # as torch does
            if backend.name() == "gloo":
                backend.recv_anysource([torch.empty(1)], _TAG).wait(_AT_ONCE)
    return groups


def free_groups(groups: list[Any]) -> None:
    """Let *groups* go, which may have to wait for threads that are in them; return at once."""
    if groups:
        threading.Thread(target=groups.clear, name="phalanx-free-groups", daemon=True).start()
