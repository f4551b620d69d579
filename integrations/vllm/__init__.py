"""vLLM with supervised workers: ``LLM(..., **phalanx.integrations.vllm.supervised())``.

Guarantees: the death of a worker costs its engine seconds, not its requests; an unsupported
configuration is an error before a worker is started, with a remedy; importing this package needs
nothing of vLLM. Tested and untested features: ``docs/tutorials/vllm.md``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .compat import Unsupported, check_installed
from .engine_state import EngineEnded, EngineRecovering, HealthRoute
from .policy import Policy, supervised
from .recovery import WeightsLost

if TYPE_CHECKING:
    from .executor import SupervisedExecutor

__all__ = [
    "EngineEnded",
    "EngineRecovering",
    "HealthRoute",
    "Policy",
    "SupervisedExecutor",
    "Unsupported",
    "WeightsLost",
    "supervised",
]


def __getattr__(name: str) -> Any:
    """Return the one name that needs vLLM."""
    if name != "SupervisedExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed()
    return getattr(import_module(f"{__name__}.executor"), name)  # it derives from a class of vLLM's
