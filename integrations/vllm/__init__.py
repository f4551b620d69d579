"""vLLM whose worker processes heal: ``LLM(..., **phalanx.integrations.vllm.supervised())``.

Guarantees: a worker that dies costs its engine seconds, not its requests; whatever the plug-in
cannot honour is an error before a worker is started, which says what to do; to import this package
needs nothing of vLLM.

Left to others: what each part promises stands at the head of its file; what has been seen to work,
and what has not, in ``docs/vllm.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .policy import Policy
from .requirements import Unsupported, check_installed
from .switch import supervised

if TYPE_CHECKING:
    from .executor import SupervisedExecutor

__all__ = ["Policy", "SupervisedExecutor", "Unsupported", "supervised"]


def __getattr__(name: str) -> Any:
    """Return `SupervisedExecutor`, which is the only name that needs vLLM."""
    if name != "SupervisedExecutor":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    check_installed()
    from .executor import SupervisedExecutor  # noqa: PLC0415  # it derives from a class of vLLM's

    return SupervisedExecutor
