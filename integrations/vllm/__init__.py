"""vLLM whose worker processes heal: ``LLM(..., **phalanx.integrations.vllm.supervised())``.

Guarantees: the death of a worker costs its engine seconds, not its requests; what the plug-in does
not support is an error before a worker is started, with a remedy; the import of this package needs
nothing of vLLM. What has been tested, and what has not: ``docs/tutorials/vllm.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .compat import Unsupported, check_installed
from .policy import Policy, supervised

if TYPE_CHECKING:
    from .executor import SupervisedExecutor
    from .story import EngineEnded, EngineRecovering

__all__ = [
    "EngineEnded",
    "EngineRecovering",
    "Policy",
    "SupervisedExecutor",
    "Unsupported",
    "supervised",
]


def __getattr__(name: str) -> Any:
    """Return one of the names that need vLLM."""
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    check_installed()
    return getattr(import_module(f"{__name__}.executor"), name)  # it derives from a class of vLLM's
