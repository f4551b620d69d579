"""The pages of ``--help``, and the completion of the command line in a shell."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli import SUBCOMMANDS, main, parse, parser_of

REFERENCE = Path(__file__).parents[3] / "docs/reference/command_line.md"


def parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers below *parser*, by the words that choose them."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        for below in getattr(action.choices, "values", tuple)():
            found[below.prog.removeprefix("phalanx ")] = below
            found |= parsers(below)
    return found


PARSERS = parsers(parser_of(*SUBCOMMANDS))


def section(name: str, head: str) -> list[str]:
    """Return the lines of the section *head* of a page of ``--help``."""
    _, _, text = PARSERS[name].format_help().partition(f"\n{head}:\n")
    return [line.strip() for line in text.partition("\n\n")[0].splitlines()]


EXAMPLES = [(name, line) for name in PARSERS for line in section(name, "Examples")]


def test_each_subcommand_and_action_has_a_page_and_stands_in_the_reference() -> None:
    shown = set(re.findall(r"program-output\} phalanx (.*) --help", REFERENCE.read_text()))

    assert PARSERS.keys() == shown == {name for name, _ in EXAMPLES}
    assert all(section(name, "Exit codes") for name in PARSERS)


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_an_example_is_a_command_line_of_its_subcommand(name: str, line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])

    parsed = parse(words[1:])

    assert words[0] == "phalanx"
    assert parsed.subcommand == name.split(maxsplit=1)[0]
    if " " in name:
        assert parsed.action == name.split()[1]


@pytest.mark.parametrize("name", PARSERS)
def test_each_argument_says_what_it_is_with_its_unit_and_its_default(name: str) -> None:
    arguments: list[Any] = [each for each in PARSERS[name]._actions if not each.choices]

    for each in arguments:
        shown = each.help or ""
        assert len(shown) > 5, each
        if each.default and each.default != argparse.SUPPRESS:
            assert "(" in shown, each
        if each.type is float:
            assert re.search("seconds|per second", shown), each


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("top no-such-driver --json", 2),
        ("logs no-such-driver", 2),
        ("logs --list", 0),
        ("health no-such-driver", 1),
        ("metrics --print alerts", 0),
        ("metrics 999999999 --port 0", 1),
        ("node --join nowhere", 2),
        ("node --join 10.0.0.1:65536", 2),
        ("web 999999999 --port 0", 1),
        ("web --port 70000", 2),
        ("reports list .", 0),
        ("reports show latest .", 2),
        ("chaos run no_such_module:build", 2),
        ("torchrun no_such_script.py", 2),
    ],
)
def test_the_exit_codes_are_those_of_the_page(
    words: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    returned = main(words.split())

    named = max((name for name in PARSERS if words.startswith(name)), key=len)
    assert returned == code
    assert str(code) in {line.split()[0] for line in section(named, "Exit codes")}


def completed(script: Path, *words: str) -> set[str]:
    """Return how bash completes the last of *words*."""
    ask = (
        f"source {script}; COMP_WORDS=(phalanx {shlex.join(words)}); "
        f"COMP_CWORD={len(words)}; _shtab_phalanx phalanx {shlex.quote(words[-1])} ''; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    bash = ["bash", "--norc", "-c", ask]
    done = subprocess.run(bash, capture_output=True, text=True, timeout=60, check=True)
    return {word.strip() for word in done.stdout.splitlines()}


def test_bash_completes_subcommands_actions_options_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")

    code = main(["completion", "bash"])

    script = tmp_path / "phalanx.bash"
    script.write_text(capsys.readouterr().out)
    assert code == 0
    assert completed(script, "he") == {"health"}
    assert completed(script, "chaos", "") >= {"run", "shrink"}
    assert completed(script, "logs", "--le") == {"--level"}
    assert completed(script, "logs", "--level", "wa") == {"warning"}
