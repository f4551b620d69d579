"""The marker ``@pytest.mark.chaos(seed=..., faults=...)``.

Guarantees: what it may not say is a usage error that names the test and the field; where tests are
spread over processes, an error of that test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from phalanx.supervision import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable

MARKER = "chaos"
WRONG: pytest.StashKey[str] = pytest.StashKey()
"""What is wrong with the markers of a test, where it is told late."""

ABOUT = (
    "chaos(*, seed, faults, duration, rate, ...): what the fixture `chaos` does to its targets; "
    "the fields of phalanx.chaos.Chaos"
)


def fields_of(item: pytest.Item) -> dict[str, Any]:
    """Return what the markers of *item* say together; nearer ones go first."""
    said: dict[str, Any] = {}
    for mark in item.iter_markers(MARKER):
        said = {**mark.kwargs, **said}
    return said


def check_markers(items: Iterable[pytest.Item], *, late: bool = False) -> None:
    """Raise unless each marker makes sense.

    Args:
        late: Have the test fail in place of that (`WRONG`): where tests are spread over processes
            an error in the collection of one of them would be taken for its crash.

    Raises:
        UsageError: one does not; it names the test.
    """
    for item in items:
        try:
            _check_item(item)
        except pytest.UsageError as error:
            if not late:
                raise
            item.stash[WRONG] = str(error)


def _check_item(item: pytest.Item) -> None:
    fixtures: Any = getattr(item, "fixturenames", ())
    marks = list(item.iter_markers(MARKER))
    if "chaos" not in fixtures:
        # Others may have a marker of this name, that only tells their tests apart.
        if any(mark.name == MARKER and mark.kwargs for mark in item.own_markers):
            raise _error(item, "the test does not ask for the fixture `chaos`, and none is run")
        return
    positional = next((mark.args for mark in marks if mark.args), None)
    if positional is not None:
        raise _error(item, f"give its fields by keyword, not {positional!r}")
    if marks:
        _check_fields(item, fields_of(item))


def _check_fields(item: pytest.Item, fields: dict[str, Any]) -> None:
    from phalanx.chaos import Chaos  # noqa: PLC0415  # paid for by those who use it

    known = Chaos.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise _error(item, f"{name}: no such field; there is {', '.join(known)}")
    try:
        Chaos(**fields)
    except SpecError as error:
        raise _error(item, str(error)) from error


def _error(item: pytest.Item, what: str) -> pytest.UsageError:
    return pytest.UsageError(f"{item.nodeid}: @pytest.mark.chaos: {what}")
