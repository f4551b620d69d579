"""What the plugin does in a session of pytest, apart from its fixtures.

Guarantees: a session that uses no fixture of the plugin keeps its environment as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .chaos_runs import RUNS, SEED_OPTION
from .marker import ABOUT, WRONG, check_markers

if TYPE_CHECKING:
    from collections.abc import Generator


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("phalanx").addoption(
        SEED_OPTION,
        type=int,
        metavar="N",
        help="what the faults of the fixture `chaos` are drawn from, in place of what tests say",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", ABOUT)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Tell the seed, where one was given."""
    seed: int | None = config.getoption(SEED_OPTION)
    return [] if seed is None else [f"phalanx: {SEED_OPTION}={seed}"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse markers that make no sense."""
    check_markers(items, late=hasattr(config, "workerinput"))  # a process of pytest-xdist


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test whose markers make no sense, where that could not be told before."""
    if WRONG in item.stash:
        pytest.fail(item.stash[WRONG], pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the seed with whatever fails."""
    report = yield
    runs = item.stash.get(RUNS, None)
    if report.failed and runs is not None:
        report.sections.append(("chaos", runs.told()))
    return report
