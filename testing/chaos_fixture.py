"""The fixture `phalanx_chaos` and its marker ``@pytest.mark.phalanx_chaos(seed=..., faults=...)``.

Guarantees: the seed is drawn before the first run and is the same for each run of the test. A run
that broke an invariant fails the test, unless the test asked to judge it itself.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phalanx.chaos import ChaosResult, Target

SEED_OPTION = "--chaos-seed"
MARKER, OLD_MARKER = "phalanx_chaos", "chaos"
_DEFAULTS: dict[str, Any] = {"duration": 5.0, "rate": 1.0}  # a test is to be short


class ChaosRuns:
    """Runs targets under faults: call it, once or several times.

    Attributes:
        seed: What the faults of this test are drawn from: ``--chaos-seed``, or else that of the
            marker, or else a new one.
        records: The folders of the runs so far; each can be given to ``phalanx chaos shrink``,
            if its target stands at the top level of a module.
    """

    def __init__(self, fields: dict[str, Any], seed: int | None, folder: Path) -> None:
        self._fields = {**_DEFAULTS, **fields}
        marked = self._fields.pop("seed", None)
        self._is_given = seed is not None
        chosen = marked if seed is None else seed
        self.seed: int = random.SystemRandom().randrange(1 << 31) if chosen is None else chosen
        self.records: list[Path] = []
        self._folder = folder

    def __call__(
        self, target: Target | str | Callable[[], Any], *, check: bool = True, **fields: Any
    ) -> ChaosResult:
        """Run *target* under faults, and return the result.

        Args:
            target: As for `phalanx.chaos.run_chaos`.
            check: Fail the test, with the history that shows it, if an invariant was broken.
            fields: Those of `phalanx.chaos.Chaos`, over those of the marker. Without any a run
                takes 5 seconds of one kill per second. A *seed* given here yields to the option.

        Raises:
            SpecError: what was asked for makes no sense; nothing was started.
        """
        __tracebackhide__ = True
        from phalanx.chaos import run_chaos  # noqa: PLC0415  # imported for those who use it

        asked = {**self._fields, **fields}
        own = asked.pop("seed", None)
        if own is not None and not self._is_given:
            self.seed = own
        if asked.get("record") is None:
            asked["record"] = self._folder / f"chaos-{len(self.records) + 1}"
        result = run_chaos(target, seed=self.seed, **asked)
        assert result.record is not None
        self.records.append(result.record)
        if check and not result.ok:
            pytest.fail(result.render())
        return result

    def describe(self) -> str:
        """Return the lines for the report of a failed test."""
        lines = [f"seed {self.seed}; again with {SEED_OPTION}={self.seed}"]
        lines += [f"record {folder}" for folder in self.records]
        return "\n".join(lines)


def marked_fields(item: pytest.Item) -> dict[str, Any]:
    """Return the fields that the markers of *item* give together; nearer ones win."""
    given: dict[str, Any] = {}
    for mark in _marks(item):
        given = {**mark.kwargs, **given}
    return given


def check_marker(item: pytest.Item) -> None:
    """Check the markers of *item*.

    Raises:
        UsageError: one makes no sense; it names the test and the field.
    """
    fixtures: Any = getattr(item, "fixturenames", ())
    if "phalanx_chaos" not in fixtures:  # another plug-in may have a marker of the old name
        if any(mark.name == MARKER for mark in item.own_markers):
            raise _error(item, "the test does not ask for the fixture `phalanx_chaos`")
        return
    marks = _marks(item)
    if any(mark.name == OLD_MARKER for mark in marks):
        warning = f"@pytest.mark.{OLD_MARKER} is now @pytest.mark.{MARKER}"
        item.warn(pytest.PytestDeprecationWarning(warning))
    positional = next((mark.args for mark in marks if mark.args), None)
    if positional is not None:
        raise _error(item, f"give its fields by keyword, not {positional!r}")
    if marks:
        _check_fields(item, marked_fields(item))


def _marks(item: pytest.Item) -> list[pytest.Mark]:
    return [mark for mark in item.iter_markers() if mark.name in (MARKER, OLD_MARKER)]


def _check_fields(item: pytest.Item, fields: dict[str, Any]) -> None:
    from phalanx.chaos import Chaos  # noqa: PLC0415  # imported for those who use it
    from phalanx.supervision import SpecError  # noqa: PLC0415

    known = Chaos.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise _error(item, f"{name}: no such field; there is {', '.join(known)}")
    try:
        Chaos(**fields)
    except SpecError as error:
        raise _error(item, str(error)) from error


def _error(item: pytest.Item, what: str) -> pytest.UsageError:
    return pytest.UsageError(f"{item.nodeid}: @pytest.mark.{MARKER}: {what}")
