"""vLLM's plug-in: what vLLM calls in each of its processes (group ``vllm.general_plugins``)."""

from __future__ import annotations

import os


def register() -> None:
    """Tell the processes below a client of ours of its engines, such as several API servers.

    In any other process it does nothing, and imports nothing of vLLM.
    """
    if "PHALANX_VLLM_STATE" in os.environ:
        from .compat import EngineDeadError  # noqa: PLC0415  # where there is something to tell
        from .engine_state import serve_states  # noqa: PLC0415

        serve_states(EngineDeadError)
