"""What a user says of nodes that join by themselves is checked field by field; keys stay apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from phalanx.cluster.join.options import VARIABLE, JoinedNodes, secrets_of_key
from phalanx.runtime import EventLoop
from phalanx.supervision import SpecError

LOOP = cast("EventLoop", None)  # not reached
KEY = "k" * 32


def nodes(**given: Any) -> JoinedNodes:
    all_given: dict[str, Any] = {"bind": "10.0.0.1", "ranks_per_node": 8, **given}
    return JoinedNodes(**all_given)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("bind", None, "give this machine's address"),
        ("bind", "0.0.0.0", "give one address"),
        ("ranks_per_node", None, "say it"),
        ("port", 0, "give an integer >= 1"),
        ("port", 65536, "<= 65535"),
        ("port", "29600", "give an integer"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy) as raised:
        nodes(**{field: value})

    assert raised.value.field == f"cluster.{field}"


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "key"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


@pytest.mark.parametrize(
    ("text", "mode", "remedy"),
    [
        ("", 0o600, "32 characters or more"),
        (f" {KEY[1:]}\n", 0o600, "32 characters or more"),
        (KEY, 0o604, "others may read it"),
        (KEY, 0o602, "others may read it"),
    ],
)
def test_a_key_file_of_no_use_is_refused_before_anything_starts(
    text: str, mode: int, remedy: str, tmp_path: Path
) -> None:
    given = nodes(key_file=key_file(tmp_path, text, mode))

    with pytest.raises(SpecError, match=remedy):
        given.engine(LOOP, gpus_per_rank=0)


@pytest.mark.parametrize("file", [None, "", "/nonexistent/key", "/", "/\0"])
def test_a_key_that_is_not_there_is_told_with_both_ways_to_give_one(
    file: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    with pytest.raises(SpecError, match=rf"name a file with a key, or set {VARIABLE}"):
        secrets_of_key("cluster.key_file", file)


def test_a_key_is_the_same_from_file_and_environment_and_no_other_makes_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)

    driver, node = secrets_of_key("", None)

    assert (driver, node) == secrets_of_key("", key_file(tmp_path, f"{KEY}\n", 0o640))
    others = secrets_of_key("", key_file(tmp_path, KEY + "x"))
    assert len({driver, node, *others}) == 4
    assert {len(secret) for secret in (driver, node, *others)} == {32}
    assert KEY not in repr(nodes(key_file=str(tmp_path / "key")))
