"""The code blocks of each page run, in order, as one program.

That of the README prints what the README says.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.markdown import commands_of, program_of
from tests.support.programs import run_python

from phalanx.cli import parse

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
pytestmark = pytest.mark.timeout(400)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _is_vllm(program: str) -> bool:
    return "import LLM" in program


def _pages() -> list[object]:
    has_vllm = importlib.util.find_spec("vllm") is not None
    skipped = pytest.mark.skipif(not has_vllm, reason="vLLM is not installed: make test-vllm")
    pages: list[object] = []
    for page in PAGES:
        program = program_of(page)
        marks: list[Any] = []
        if _is_vllm(program):
            marks = [pytest.mark.vllm, pytest.mark.timeout(1600), skipped]
        if "import Executor, Ray" in program:
            marks = [pytest.mark.skip(reason="it needs a Ray: tests/integration/ray runs it")]
        if program.strip():
            pages.append(pytest.param(page, program, marks=marks, id=_name(page)))
    return pages


@pytest.mark.parametrize(("page", "program"), _pages())
def test_the_code_blocks_of_the_page_run(page: Path, program: str, tmp_path: Path) -> None:
    file = tmp_path / f"test_{page.stem}.py"  # asyncio.py would hide a module
    file.write_text(program)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PATH": path,
        # torch would leave these where files that are left count.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    timeout = 1500.0 if _is_vllm(program) else 180.0
    as_tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]

    for words in [[], *([as_tests] if "\ndef test_" in program else [])]:
        options: Any = {"env": {**os.environ, **own}, "timeout": timeout}
        done = run_python(*words, str(file), cwd=tmp_path, **options)

        said = done.stdout + done.stderr
        lines = re.findall(rf"{file.name}(?:\", line |:)(\d+)", said)
        where = f"{_name(page)}:{lines[-1] if lines else 1}"
        assert done.returncode == 0, f"{where}\n{said}"
        if page == ROOT / "README.md" and not words:
            promise = re.search(r"It prints `(.*?)` and `(.*?)`", page.read_text())
            assert promise is not None
            assert done.stdout.splitlines() == list(promise.groups())


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_the_commands_of_the_page_exist(page: Path) -> None:
    for number, command in commands_of(page):
        alone = re.split(r" [|>]", command)[0]
        words = shlex.split(re.sub(r"\[(.*?)\]", r"\1", alone), comments=True)
        where = f"{_name(page)}:{number}: {command}"
        match words:
            case ["phalanx", *given]:
                try:
                    parse([each.split("|")[0] for each in given])
                except SystemExit as ended:
                    assert ended.code == 0, where
            case ["make", target]:
                assert f"\n{target}:" in (ROOT / "Makefile").read_text(), where
            case ["python", "-m", module, *_] if module.startswith(("phalanx.", "benchmarks")):
                assert importlib.util.find_spec(module), where
            case ["python", file, *_] if not file.startswith("-"):
                assert (ROOT / file).is_file(), where
            case _:
                pass
