"""A small Llama with random weights and a tokenizer of bytes, made on the spot.

Guarantees: nothing is downloaded; the same folder every time; the weights are large enough that
greedy decoding does not fall into repeating one token, as it does with those vLLM invents.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_HIDDEN = 128
_INNER = 256
_HEADS = 4
_VOCABULARY = 260  # the bytes, and four that have a meaning
_LONGEST = 1024
_SEED = 7
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": _LONGEST,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def make_model(folder: Path, layers: int = 2) -> Path:
    """Write the model and its tokenizer to *folder*, which vLLM then loads; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    _write_weights(folder, layers)
    _write_tokenizer(folder)
    return folder


def _write_weights(folder: Path, layers: int) -> None:
    torch: Any = import_module("torch")
    chance = torch.Generator().manual_seed(_SEED)

    def normal(rows: int, columns: int, spread: float = 0.22) -> Any:
        return torch.randn(rows, columns, generator=chance) * spread

    weights = {
        "model.embed_tokens.weight": normal(_VOCABULARY, _HIDDEN, 1.0),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": normal(_VOCABULARY, _HIDDEN),
    }
    for number in range(layers):
        layer = f"model.layers.{number}."
        for name in ("q", "k", "v", "o"):
            weights[f"{layer}self_attn.{name}_proj.weight"] = normal(_HIDDEN, _HIDDEN)
        weights[f"{layer}mlp.gate_proj.weight"] = normal(_INNER, _HIDDEN)
        weights[f"{layer}mlp.up_proj.weight"] = normal(_INNER, _HIDDEN)
        weights[f"{layer}mlp.down_proj.weight"] = normal(_HIDDEN, _INNER)
        weights[f"{layer}input_layernorm.weight"] = torch.ones(_HIDDEN)
        weights[f"{layer}post_attention_layernorm.weight"] = torch.ones(_HIDDEN)
    save = import_module("safetensors.torch").save_file
    save(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    parts: Any = import_module("tokenizers")
    letters = sorted(parts.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = parts.Tokenizer(parts.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = parts.decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    added = [parts.AddedToken(text, special=True) for text in special.values()]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": _LONGEST}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, **special}))
