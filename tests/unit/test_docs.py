"""What the documents say is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import phalanx
from phalanx import actors, errors, events, runtime, supervision

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
EVENTS = ROOT / "docs/reference/events.md"
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)


def anchors(document: Path) -> set[str]:
    """Return what the headings of *document* are called in links."""
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_leads_nowhere(document: Path) -> None:
    missing: list[str] = []
    lines = document.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", line):
            path = document.parent / target if target else document
            if not path.exists() or (anchor and anchor not in anchors(path)):
                missing.append(f"{document.relative_to(ROOT)}:{number}: {target}#{anchor}")
    assert missing == []


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"\bmake ([a-z]+)\b(?= {2}|`| *#|$)", text, re.MULTILINE))

    assert named
    assert {target for target in named if f"\n{target}:" not in MAKEFILE} == set()


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CHANGELOG.md",
        *(f"docs/concepts/{name}.md" for name in ("delivery", "failure_model", "process_groups")),
    ],
)
def test_every_name_of_the_package_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    names = set(re.findall(r"`phalanx\.(?:errors\.|events\.)?(\w+)`", text))
    methods = set(re.findall(r"`Executor\.(\w+)\(\)`", text))

    packages = {path.stem for path in Path(phalanx.__file__).parent.iterdir()}
    faces = (phalanx, errors, events, actors, runtime, supervision)
    assert names - packages <= {name for face in faces for name in dir(face)}
    assert {name for name in methods if not hasattr(phalanx.Executor, name)} == set()


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    layers = ("supervision", "runtime", "cluster", "actors", "chaos", "integrations")
    files = set(re.findall(rf"`((?:{'|'.join(layers)})/[\w/]+\.py)`", text))
    rooms = set(re.findall(rf"^\| `((?:{'|'.join(layers)})/\w+)` \|", text, re.MULTILINE))

    assert len(files) >= 20
    assert {name for name in files if not (ROOT / name).is_file()} == set()
    on_disk = {
        f"{layer}/{init.parent.name}"
        for layer in layers
        for init in (ROOT / layer).glob("*/__init__.py")
    }
    assert rooms == on_disk


def test_the_page_of_events_names_each_event_that_the_code_emits() -> None:
    folders = ("supervision", "actors", "runtime", "cluster", "integrations")
    code = "".join(path.read_text() for each in folders for path in (ROOT / each).rglob("*.py"))
    emitted = set(re.findall(r"event(?:: ClassVar\[str\])? ?= ?\"(?:phalanx\.)?(\w+)\"", code))
    emitted |= set(re.findall(r"\b_?log(?:ger\(\))?\.\w+\(\s*f?\"phalanx\.(\w+)", code))
    named = set(re.findall(r"^\| `phalanx\.(\w+)`", EVENTS.read_text(), re.MULTILINE))

    of_status = {"group_state", "tree_state", "status_ended"}  # what observers ask for
    assert emitted - of_status - named == set()
    assert {name for name in named if f"phalanx.{name}" not in code} - emitted == set()
