"""A worker of vLLM's that fails as a GPU's would: where, and on which rank, a folder says.

A file ``WHERE-RANK`` in the folder ``PHALANX_FAULTS`` has that rank raise a CUDA error in its
method *WHERE*, or a plain error where its text is "mistake", and is removed by that. ``poison``
holds the name of a request that kills whatever computes it, for as long as the file is there.
"""

# vLLM is not installed where this is checked.
# pyright: reportUnknownVariableType=false, reportUntypedBaseClass=false

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

CPUWorker: Any = import_module("vllm.v1.worker.cpu_worker").CPUWorker

TEXT = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call"
)


class FaultyWorker(CPUWorker):  # type: ignore[misc]  # vLLM need not be installed
    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        fail("execute_model", self.rank)
        poison = folder() / "poison"
        if poison.exists() and any(
            each.startswith(poison.read_text()) for each in scheduled.num_scheduled_tokens
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_model(scheduled, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        fail("sample_tokens", self.rank)
        return super().sample_tokens(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        fail("load_model", self.rank)
        return super().load_model(*args, **kwargs)

    def determine_available_memory(self) -> int:
        fail("determine_available_memory", self.rank)
        found: int = super().determine_available_memory()
        return found

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        fail("initialize_from_config", self.rank)
        return super().initialize_from_config(*args, **kwargs)


def folder() -> Path:
    return Path(os.environ["PHALANX_FAULTS"])


def fail(where: str, rank: int) -> None:
    file = folder() / f"{where}-{rank}"
    if file.exists():
        text = file.read_text()
        file.unlink()
        raise RuntimeError("a mistake") if text == "mistake" else torch.AcceleratorError(TEXT)
