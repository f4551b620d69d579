"""`supervised`: the one line that turns a vLLM engine into one that heals.

Guarantees: what it returns is what vLLM's own arguments take; everything that can be checked
without a model has been, before vLLM sees any of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from phalanx.supervision import SpecError

from .policy import KEY, Policy
from .requirements import check_installed


def supervised(
    *, additional_config: Mapping[str, Any] | None = None, **policy: Any
) -> dict[str, Any]:
    """Return the arguments that have vLLM run its workers under supervision.

    ``LLM(model, tensor_parallel_size=2, **supervised())``, and alike for ``EngineArgs`` and
    ``AsyncEngineArgs``. For ``vllm serve`` see ``docs/vllm.md``.

    Args:
        additional_config: What you give to vLLM under that name yourself; it is kept.
        policy: The fields of `Policy`, by name; all have defaults.

    Raises:
        Unsupported: vLLM is missing, or its version has not been tested.
        SpecError: a field makes no sense.
    """
    check_installed()
    if additional_config is not None and not isinstance(cast("object", additional_config), Mapping):
        raise SpecError("additional_config", additional_config, "give a mapping")
    if KEY in (additional_config or {}):
        raise SpecError(
            "additional_config",
            additional_config,
            f"give the fields of {KEY} to supervised() itself",
        )
    said = Policy.from_json(policy).to_json()
    from .executor import SupervisedExecutor  # noqa: PLC0415  # it derives from a class of vLLM's

    return {
        "distributed_executor_backend": SupervisedExecutor,
        "additional_config": {**(additional_config or {}), KEY: said},
    }
