"""A Markdown page as a program: its code blocks, each line under its number on the page."""

from __future__ import annotations

import re
from pathlib import Path

_FENCE = re.compile(r"^(`{3,})(\w*)")
_DIRECTIVE = re.compile(r"^<!-- (preamble: (?P<name>\w+)|run) -->$")


def program_of(page: Path) -> str:
    """Return the ``python`` blocks of *page*, in order, with blank lines between them.

    Two directives, comments on a line of the page that readers do not see, go before a block:
    ``<!-- preamble: NAME -->`` has the names of ``tests/support/preambles/NAME.py`` imported;
    ``<!-- run -->`` has the commands of a ``console`` block run as well.
    """
    lines: list[str] = []
    fence = kind = ""
    runs = False
    for line in page.read_text().splitlines():
        code = ""
        found = _FENCE.match(line)
        if fence:
            if line == fence:
                fence = ""
            elif kind == "python":
                code = line
            elif kind == "console" and runs and line.startswith("$ "):
                command = line.removeprefix("$ ")
                code = f"__import__('subprocess').run({command!r}, shell=True, check=True)"
        elif found:
            fence, kind = found.groups()
        elif directive := _DIRECTIVE.match(line):
            runs = not directive["name"]
            if not runs:
                code = f"from tests.support.preambles.{directive['name']} import *"
        elif line:
            runs = False
        lines.append(code)
    return "\n".join(lines) + "\n"


def commands_of(page: Path) -> list[tuple[int, str]]:
    """Return the commands of the ``console`` blocks of *page*, each with its line number."""
    commands: list[tuple[int, str]] = []
    kind = ""
    lines = enumerate(page.read_text().splitlines(), 1)
    for number, line in lines:
        if found := _FENCE.match(line):
            kind = "" if kind else found[2] or "text"
        elif kind == "console" and line.startswith("$ "):
            command = line.removeprefix("$ ")
            while command.endswith("\\"):
                command = command[:-1] + next(lines)[1]
            commands.append((number, command))
    return commands
