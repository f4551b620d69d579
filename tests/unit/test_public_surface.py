"""What users may rely on: every public name, and an import that stays light."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import phalanx
import phalanx.chaos
import phalanx.errors
import phalanx.events
import phalanx.testing
from phalanx.runtime import Event
from phalanx.supervision import Notice

if TYPE_CHECKING:
    from types import ModuleType


@pytest.mark.parametrize("name", phalanx.__all__)
def test_every_public_name_exists_and_says_what_it_is(name: str) -> None:
    found = getattr(phalanx, name)

    assert not inspect.isclass(found) or found.__doc__


DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))


@pytest.mark.parametrize("module", [phalanx, phalanx.chaos, phalanx.testing])
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    named = set(re.findall(r"^\.\. auto\w+:: (\S+)$", REFERENCE, re.MULTILINE))
    whole = {f"{module.__name__}.{name}" for name in dir(phalanx.errors)}  # by one directive

    public = {name for name in module.__all__ if callable(getattr(module, name))}
    assert {f"{module.__name__}.{name}" for name in public} <= named | whole


def test_every_public_name_of_the_plug_in_for_vllm_is_in_the_reference() -> None:
    module = "phalanx.integrations.vllm"
    named = re.search(rf"automodule:: {module}\n +:members: (.*)", REFERENCE)

    assert named is not None
    needs_vllm = {"SupervisedExecutor"}
    assert {*import_module(module).__all__} - needs_vllm == set(named[1].split(", "))


def test_every_name_of_a_layer_that_a_document_uses_is_in_the_reference() -> None:
    layers = "actors|chaos|runtime|supervision|testing"
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    imports = re.findall(rf"^from phalanx\.(?:{layers}) import (\([^)]*\)|.*)$", text, re.MULTILINE)
    used = {name for names in imports for name in re.findall(r"\w+", names)}
    used |= set(re.findall(rf"`phalanx\.(?:{layers})\.(\w+)", text))

    directives = r"^\.\. (?:auto\w+|py:data):: [\w.]+\.(\w+)$"
    assert used - set(re.findall(directives, REFERENCE, re.MULTILINE)) == set()


def test_nothing_else_is_public() -> None:
    others = {
        name
        for name in dir(phalanx)
        if not name.startswith("_") and not inspect.ismodule(getattr(phalanx, name))
    }

    assert sorted(others) == sorted(phalanx.__all__)  # each stands there once


# They go to the log alone, or are what `status` shows.
LOG_ONLY = {
    *("CallbackFailed", "ForkUnsafe", "HelperReplaced", "HelperUnavailable", "LinesDropped"),
    *("GroupStatus", "StatusEnded", "StreamUnavailable", "TreeStatus"),
}


def test_every_event_that_subscribers_get_is_public() -> None:
    found, pending = set[str](), [Event, Notice]
    while pending:
        kind: Any = pending.pop()
        pending += kind.__subclasses__()
        layer = kind.__module__.split(".")[1]
        if kind.__subclasses__() == [] and layer in ("actors", "cluster", "runtime"):
            found.add(kind.__name__)

    # pytest adds names of its own to the modules of an installed plugin.
    public = {name for name in dir(phalanx.events) if not name.startswith(("_", "@"))}
    notices = {kind.__name__ for kind in Notice.__subclasses__()}
    assert (found - LOG_ONLY) | notices | {"Emitted"} == public


def test_a_layer_is_an_attribute_and_an_unknown_name_is_refused() -> None:
    assert inspect.ismodule(getattr(phalanx, "supervision"))  # noqa: B009  # as below
    with pytest.raises(AttributeError, match="no attribute 'Exekutor'"):
        getattr(phalanx, "Exekutor")  # noqa: B009  # for the type checkers there is none


def test_importing_phalanx_loads_nothing_heavy_and_starts_nothing() -> None:
    # rich is not among them: structlog imports it where it is installed.
    code = (
        "import sys, threading, phalanx\n"
        "heavy = {'torch', 'zmq', 'numpy', 'pynvml'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count())"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.split() == ["[]", "1"]
