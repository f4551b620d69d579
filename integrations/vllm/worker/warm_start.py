"""The shared part of the start of ranks: done once, by the process that they are forked from.

Guarantees: the import of this module imports what of vLLM a worker imports on its way to its first
step, registers what each would register, and compiles, on a CPU, the two functions that vLLM
compiles for any model; the process keeps its one thread; what this release lacks, or cannot
compile, and plug-ins of others are left to the workers.

To compile takes a compiler and a thread, unless the result is in torch's cache on the disk. So a
child does it first, and its exit code says whether a thread was left.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.integrations.vllm import compat

if TYPE_CHECKING:
    from collections.abc import Callable

_TRIES = 2  # the first fills the cache
_CLEAN, _LEFT_A_THREAD, _FAILED = range(3)


def warm_up() -> None:
    """Import and compile."""
    for name in compat.PRELOADED.split():
        with suppress(ImportError):
            import_module(name)
    _register()
    if not compat.current_platform.is_cpu():
        return
    _code_of_child(lambda: None)  # libraries that end their threads before a fork (OpenBLAS) do so
    if _threads() != 1:
        return
    for _ in range(_TRIES):
        left = _code_of_child(compile_shared)
        if left == _CLEAN:
            compile_shared()
        if left != _LEFT_A_THREAD:
            return


def _register() -> None:
    """Load vLLM's own plug-ins, and put the platform's kernels in place of Triton's.

    The latter looks at every name of every module, and would again: it does not know that it has
    been done. Others' plug-ins come before it, and may do anything.
    """
    plugins = metadata.entry_points(group="vllm.general_plugins")
    if all(each.module.startswith(("vllm.", "phalanx.")) for each in plugins):
        compat.load_general_plugins()
        platform = compat.current_platform
        if callable(register := getattr(platform, "register_triton_kernel_overrides", None)):
            register()
            platform.register_triton_kernel_overrides = lambda: None


def compile_shared() -> None:
    """Compile the rows' masks of an embedding that ranks share, and the ranking of tokens.

    Just as a step of a rank with one processor calls them: what torch has compiled it takes only
    for tensors of the same type and mode, not for one row where it was several, and only with as
    many threads. Ranks that have more compile by themselves, from the cache on the disk.
    """
    torch: Any = import_module("torch")
    embedding, ranking = compat.embedding, compat.ranking
    buffer = torch.zeros(8, dtype=torch.int32)
    with torch.inference_mode(), ExitStack() as after:
        after.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for count in (5, 1):
            embedding.get_masked_input_and_mask(buffer[:count], 0, 130, 0, 260, 260)
        for rows, columns in ((2, 8), (3, 9)):
            scores, chosen = torch.zeros(rows, columns), torch.zeros(rows, 1)
            for each in (scores, chosen):
                torch._dynamo.decorators.mark_unbacked(each, 0)  # noqa: SLF001  # as vLLM does
            ranking.batched_count_greater_than(scores, chosen)


def _code_of_child(do: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = _FAILED
    try:
        do()
        left = _CLEAN if _threads() == 1 else _LEFT_A_THREAD
    finally:
        os._exit(left)


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


warm_up()
