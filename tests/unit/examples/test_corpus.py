"""The corpus is large, the same every time, and made without running anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minilm.corpus import Passage, corpus
from minilm.dataset import MAX_TOKENS, batches, tokenize
from minilm.weights import model_folder

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def everything() -> list[Passage]:
    return corpus()


def test_there_are_at_least_five_thousand_different_passages(everything: list[Passage]) -> None:
    assert len({passage.text for passage in everything}) == len(everything) >= 5000


def test_another_process_finds_the_same_passages_in_the_same_order(
    everything: list[Passage],
) -> None:
    digest = "import minilm.corpus as c; print(*(p.text for p in c.corpus(3000)), sep='\\n')"
    environment = {"PYTHONPATH": str(EXAMPLES), "PYTHONHASHSEED": "7", "PYTHONUTF8": "1"}

    found = subprocess.run(
        [sys.executable, "-c", digest], env=environment, capture_output=True, check=True, timeout=60
    )

    assert found.stdout.decode().splitlines() == [each.text for each in everything[:3000]]


@pytest.mark.parametrize("count", [0, 1, 48, 120, 200])
def test_a_few_are_the_first_of_all(everything: list[Passage], count: int) -> None:
    assert corpus(count) == everything[:count]


def test_what_everybody_asks_for_is_in_the_first_five_thousand(everything: list[Passage]) -> None:
    names = {passage.name for passage in everything[:5000]}

    assert {
        "io.open",
        "pathlib.Path.open",
        "json.dumps",
        "help.for",
        "random.Random.shuffle",
    } <= names


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '"""Says hello."""\nraise SystemExit("this module was run")\n'
    (tmp_path / "dangerous.py").write_text(source)
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.setattr("minilm.corpus.sysconfig.get_path", {"stdlib": str(tmp_path)}.get)

    assert corpus() == [Passage("dangerous", "dangerous: Says hello.")]
    assert "dangerous" not in sys.modules


def test_every_passage_is_in_exactly_one_batch_under_its_own_tokens(
    everything: list[Passage],
) -> None:
    texts = [passage.text for passage in everything[:100]]
    tokens = tokenize(model_folder(), texts)

    made = list(batches(tokens, 7))

    rows = [row for batch in made for row in batch.rows]
    assert sorted(rows) == list(range(100))
    assert [batch.number for batch in made] == list(range(15))
    for batch in made:
        for row, ids in zip(batch.rows, batch.ids, strict=True):
            there = [int(token) for token in ids]
            assert there[: len(tokens[row])] == tokens[row]
            assert not any(there[len(tokens[row]) :])
    assert max(map(len, tokens)) <= MAX_TOKENS
