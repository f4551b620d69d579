"""Aborts the process groups of this process, so that it can join those of the next epoch.

- gloo closes its connections when the last reference to a group is gone. A worker that keeps one of
  its own (the group, a module that was given it, the handle of an operation, a thread that is in
  one) would block every rank that waits for it until the group's timeout, 30 minutes by default;
  torch has no call that ends them (``shutdown`` and ``abort`` do nothing in gloo 2.13). But an
  operation whose own timeout is over closes every connection of its group, so a group is aborted by
  one of a millisecond. A thread in the middle of a message gets no error
  (`Pair::signalException`): it waits until the group's timeout, and so does what frees the group
  (`free_groups` does that on a separate thread).
- NCCL: every group is aborted, for the abort of a group does not reach those split from it, all at
  once, each on a thread of its own: an abort frees memory of the device, which waits for every
  kernel that runs there, also for those that only the abort of another group ends. One after the
  other they block each other (seen with NCCL 2.28.9), also within one ``ncclGroupStart``: torch
  aborts on a thread of its own, which the caller's NCCL group does not reach. An operation under
  way then ends *without an error* and its results are undefined, also on a rank that has not been
  aborted yet: the kernels of an aborted rank pass on what they have. So every rank that is kept
  notes that its results are void, and gives up its default group, before any is aborted.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from importlib import import_module
from typing import Any

from phalanx.runtime.threads.event_loop import resolve
from phalanx.supervision import RuntimeFault

_AT_ONCE = timedelta(milliseconds=1)
_TAG = (1 << 31) - 1  # of a message that no rank sends
_ABORT = 5.0  # seconds for the abort of all communicators: nine times what was seen (docs/gpu.md)


def void_process_groups() -> bool:
    """Return whether an abort of this process's groups leaves results undefined (NCCL).

    Then there is no default group from now on: `torch.distributed.is_initialized()` is False.
    """
    world = _world()
    if world is None or not any(_is_nccl(world, group) for group in list(world.pg_map)):
        return False
    import_module("torch.distributed.distributed_c10d")._update_default_pg(None)  # noqa: SLF001  # as torch does
    return True


def abort_process_groups() -> list[Any]:
    """End all operations of the process groups that this process is in; return its groups.

    Raises:
        RuntimeFault: NCCL took too long, or failed: this process cannot leave its groups.
    """
    world = _world()
    if world is None:
        return []
    torch: Any = import_module("torch")
    groups = list(world.pg_map)
    for group in groups:
        with contextlib.suppress(Exception):  # it raises that the time is over, or is not gloo's
            backend = group._get_backend(torch.device("cpu"))  # noqa: SLF001  # as torch does
            if backend.name() == "gloo":
                backend.recv_anysource([torch.empty(1)], _TAG).wait(_AT_ONCE)
    nccl = [group for group in groups if _is_nccl(world, group)]
    if nccl:
        void_process_groups()
        _abort(nccl)
    return groups


def leave_process_groups() -> None:
    """Destroy this process's groups, or forget them if they were aborted."""
    dist = sys.modules.get("torch.distributed")
    world = _world()
    if dist is None or world is None:
        return
    if dist.is_initialized():
        with contextlib.suppress(Exception):  # a broken group cannot be left in order
            dist.destroy_process_group()
    elif world.pg_map:  # to shut down what was aborted could block
        for known in (
            *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
            *(world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state),
        ):
            known.clear()
        dist.distributed_c10d._unregister_all_process_groups()  # noqa: SLF001  # as torch does
    # The names of the store's keys contain the number of groups that the process has formed, and a
    # group that could not be formed is counted: in the next epoch this rank would wait for the
    # others under keys that none of them writes.
    with contextlib.suppress(AttributeError):
        world.group_count = 0


def free_groups(groups: list[Any]) -> None:
    """Let *groups* go, which may have to wait for threads that are in them; return at once."""
    if groups:
        threading.Thread(target=groups.clear, name="phalanx-free-groups", daemon=True).start()


def _world() -> Any:
    """Return torch's table of process groups; None if this process has none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    return dist.distributed_c10d._world  # noqa: SLF001  # there is no other way


def _is_nccl(world: Any, group: Any) -> bool:
    config = world.pg_backend_config.get(group)
    if config is None:  # it is being made
        config, _ = world.pg_map.get(group, ("", None))
    return "nccl" in str(config)


def _abort(groups: list[Any]) -> None:
    """Abort *groups*, all at the same time."""
    results: list[Future[None]] = []
    for group in groups:
        result: Future[None] = Future()
        results.append(result)
        thread = threading.Thread(
            target=resolve, args=(result, group.abort), name="phalanx-abort", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as no_thread:
            result.set_exception(no_thread)
    ended = wait(results, _ABORT, FIRST_EXCEPTION).done
    error = next(filter(None, (result.exception() for result in ended)), None)
    if error is None and len(ended) == len(results):
        return
    how = f"did not return within {_ABORT:g} s" if error is None else f"failed: {error}"
    what = f"the abort of its {len(groups)} NCCL process group(s)"
    raise RuntimeFault(f"{what} {how}") from error
