"""The documentation of the Python standard library, as short passages.

Guarantees: nothing is imported and nothing is run, sources are only parsed; one installation gives
the same passages in the same order each time; what a reader is most likely to ask for (public
names of public modules; how their documentation begins) comes first, so that a small corpus is a
useful one.
"""

from __future__ import annotations

import ast
import functools
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LIMIT = 160
"""Characters of a passage beyond which a paragraph goes into the next one."""

_APART = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
)

_FEW = 500  # passages, about as many as there are modules
_WITHIN = (False, False, 0, 2, "")  # where that begins which is within a module (`_rank`)

Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences of documentation.

    Attributes:
        name: What they document, with its module.
        text: What is embedded: the name with its signature, then the sentences.
        part: Which piece of that documentation it is, from 0.
    """

    name: str
    text: str
    part: int = 0


def corpus(count: int | None = None) -> list[Passage]:
    """Return the first *count* passages, or all of them."""
    root = Path(sysconfig.get_path("stdlib"))
    if count is not None and count <= _FEW:
        first = _first(root)
        if len(first) >= count:
            return list(first[:count])
    return list(_everything(root)[:count])


@functools.cache
def _first(root: Path) -> tuple[Passage, ...]:
    """Return what documents a module as a whole; the modules within packages are not read."""
    modules = [*root.glob("*.py"), *root.glob("*/__init__.py")]
    return tuple(each for each in _passages(root, modules) if _rank(each) < _WITHIN)


@functools.cache
def _everything(root: Path) -> tuple[Passage, ...]:
    return tuple(_passages(root, root.rglob("*.py")))


def _passages(root: Path, paths: Iterable[Path]) -> list[Passage]:
    found: dict[str, Passage] = {}
    for path in sorted(paths):
        relative = path.relative_to(root)
        if not _APART.intersection(relative.parts):
            for passage in _read(path, _module(relative)):
                found.setdefault(passage.text, passage)
    return sorted(found.values(), key=_rank)


def _rank(passage: Passage) -> tuple[bool, bool, int, int, str]:
    """Return where *passage* belongs, as a key to sort by."""
    parts = passage.name.split(".")
    hidden = any(part.startswith("_") for part in parts)
    # Windows' and Tk's wrappers, and the codecs' tables, are much text that few ask about.
    remote = parts[0] in {"tkinter", "distutils", "encodings", "msilib"}
    return hidden, remote, passage.part, len(parts), passage.name


def _module(path: Path) -> str:
    parts = [*path.parent.parts, path.stem]
    if parts[-1] == "__init__":
        parts.pop()
    first = parts[0]
    # `_pyio` documents `io`: it is the same module, written in Python.
    if first.startswith("_py") and first[3:] in sys.stdlib_module_names:
        parts[0] = first[3:]
    return ".".join(parts)


def _read(path: Path, module: str) -> Iterator[Passage]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a template, or a file that is wrong on purpose
        return
    if module == "pydoc_data.topics":
        yield from _topics(tree)
    else:
        yield from _walk(tree, module, "")


def _walk(node: Documented, name: str, signature: str) -> Iterator[Passage]:
    documentation = ast.get_docstring(node)
    if documentation:
        yield from _cut(name, signature, documentation)
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{name}.{child.name}", "")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}", f"({_arguments(child)})")


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return ", ".join(name for name in names if name not in {"self", "cls"})


def _topics(tree: ast.Module) -> Iterator[Passage]:
    """Yield the language reference that `help()` prints, a dictionary in a module of its own."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = cast("dict[str, str]", ast.literal_eval(node.value))
            for topic, text in topics.items():
                yield from _cut(f"help.{topic}", "", text)


def _cut(name: str, signature: str, documentation: str) -> Iterator[Passage]:
    """Yield *documentation* in passages of whole paragraphs."""
    head = f"{name}{signature}: "
    taken = ""
    part = 0
    for paragraph in documentation.split("\n\n"):
        words = " ".join(paragraph.split())
        if not any(char.isalpha() for char in words):
            continue  # a ruler, or a table's frame
        if taken and len(taken) + len(words) > LIMIT:
            yield Passage(name, head + taken, part)
            taken = ""
            part += 1
        taken = f"{taken} {words}".lstrip()
    if taken:
        yield Passage(name, head + taken, part)
