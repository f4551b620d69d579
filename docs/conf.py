"""Configuration of Sphinx: `make docs` builds the site into build/docs.

A link that leaves docs/ is right in the repository. On the site one to a file of `SHOWN` leads to
the page that shows that file, and any other is text.
"""  # noqa: INP001 # a script

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

project = "phalanx"
author = "the phalanx authors"
release = metadata.version("phalanx")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.programoutput",
]
html_theme = "furo"
html_title = f"phalanx {release}"
html_show_copyright = False

default_role = "py:obj"  # `name` in a docstring is a link where the name is documented, else code
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # fields are described once, by their class
napoleon_custom_sections = [("Source", "references_style"), ("Guarantees", "notes_style")]
myst_heading_anchors = 3

DOCS = Path(__file__).parent
SHOWN = {
    "benchmarks": "benchmarks/README.md",
    "changelog": "CHANGELOG.md",
    "security": "SECURITY.md",
}
FILES = {page: DOCS.parent / file for page, file in SHOWN.items()}
PAGES = {file: DOCS / f"{page}.md" for page, file in FILES.items()}


def rewrite_links(_app: Any, page: str, source: list[str]) -> None:
    """Have the links of *page* lead to pages of the site."""
    place = FILES.get(page, DOCS / page)
    if page in FILES:
        source[0] = place.read_text()

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups("")
        path = Path(os.path.normpath(place.parent / target))
        path = PAGES.get(path, path)
        if path.is_relative_to(DOCS):
            return f"[{text}]({os.path.relpath(path, (DOCS / page).parent)}{anchor})"
        return text

    source[0] = re.sub(r"\[([^]]+)\]\(((?!\w+:)[^)#\s]+)(#[^)]*)?\)", link, source[0])


def setup(app: Any) -> None:
    """Register the hook."""
    app.connect("source-read", rewrite_links)
