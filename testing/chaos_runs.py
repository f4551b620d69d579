"""The fixture `chaos`: chaos runs of one test.

Guarantees: the seed is settled before the first run and is the same for each run of the test; it is
known to the test's report whatever the test fails of. A run that broke an invariant fails the test,
unless it asked to judge itself.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from .marker import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phalanx.chaos import ChaosResult, Target

SEED_OPTION = "--chaos-seed"
_USUAL: dict[str, Any] = {"duration": 5.0, "rate": 1.0}  # a test is to be short


class ChaosRuns:
    """Runs targets under faults: call it, once or several times.

    Attributes:
        seed: What the faults of this test are drawn from: ``--chaos-seed``, or else that of the
            marker, or else a new one.
        records: The folders of the runs so far; each can be given to ``phalanx chaos shrink``,
            if its target stands at the top level of a module.
    """

    def __init__(
        self, fields: dict[str, Any], seed: int | None, new_folder: Callable[[], Path]
    ) -> None:
        self._fields = {**_USUAL, **fields}
        marked = self._fields.pop("seed", None)
        self._is_given = seed is not None
        chosen = marked if seed is None else seed
        self.seed: int = random.SystemRandom().randrange(1 << 31) if chosen is None else chosen
        self.records: list[Path] = []
        self._new_folder = new_folder

    def __call__(
        self, target: Target | str | Callable[[], Any], *, check: bool = True, **fields: Any
    ) -> ChaosResult:
        """Run *target* under faults, and return what came of it.

        Args:
            target: As for `phalanx.chaos.run_chaos`.
            check: Fail the test, with the history that shows it, if an invariant was broken.
            fields: Those of `phalanx.chaos.Chaos`, over those of the marker. Without any a run
                takes 5 seconds of one kill per second. A *seed* given here yields to the option.

        Raises:
            SpecError: what was asked for makes no sense; nothing was started.
        """
        __tracebackhide__ = True
        from phalanx.chaos import run_chaos  # noqa: PLC0415  # paid for by those who use it

        asked = {**self._fields, **fields}
        own = asked.pop("seed", None)
        if own is not None and not self._is_given:
            self.seed = own
        if asked.get("record") is None:
            asked["record"] = self._new_folder() / f"chaos-{len(self.records) + 1}"
        result = run_chaos(target, seed=self.seed, **asked)
        assert result.record is not None
        self.records.append(result.record)
        if check and not result.ok:
            pytest.fail(result.render())
        return result

    def told(self) -> str:
        """Return what the report of a failed test says of its runs."""
        lines = [f"seed {self.seed}; again with {SEED_OPTION}={self.seed}"]
        lines += [f"record {folder}" for folder in self.records]
        return "\n".join(lines)


RUNS: pytest.StashKey[ChaosRuns] = pytest.StashKey()


@pytest.fixture
def chaos(request: pytest.FixtureRequest) -> ChaosRuns:
    """Runs a target under faults and checks that it lost nothing: ``chaos(build)``."""

    def new_folder() -> Path:
        folder: Path = request.getfixturevalue("tmp_path")
        return folder

    item: pytest.Item = request.node
    given: int | None = request.config.getoption(SEED_OPTION)
    new_folder()  # before the test: no fixture may be asked for once they are being ended
    runs = ChaosRuns(fields_of(item), given, new_folder)
    item.stash[RUNS] = runs
    return runs
