"""vLLM whose worker processes heal: ``LLM(..., **phalanx.integrations.vllm.supervised())``.

Guarantees: the death of a worker costs its engine seconds, not its requests; what the plug-in does
not support is an error before a worker is started, with a remedy; the import of this package needs
nothing of vLLM. What has been tested, and what has not: ``docs/tutorials/vllm.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .policy import Policy, supervised
from .requirements import Unsupported, check_installed

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
