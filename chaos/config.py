"""`Chaos`: the configuration of a run, validated when it is built.

A seed that is not given is drawn then, so that the run can be reproduced.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.actors import POINTS
from phalanx.runtime import find_gpus
from phalanx.supervision import SpecError, check_count, check_kind, check_number

from .nemesis.catalog import FAULTS, TARGETS, FaultPattern, is_rank
from .nemesis.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST, _MOST = 1e-6, 1e9  # of a rate, and of seconds; Python's locks wait for ten times that
_RECOVERY = 1.0  # seconds; a shorter run would end before a group has recovered once
_MOST_FAULTS = 100_000  # arbitrary; a history of so many does not fit into memory


def _new_seed() -> int:
    return random.SystemRandom().randrange(1 << 31)


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """The faults of a run, their duration, and what is expected of the target.

    Attributes:
        duration: Seconds of faults and traffic, without the start and the end of the target.
        rate: Faults per second, on average, at random times.
        faults: Patterns such as ``"kill"``, ``"kill:zygote"`` or ``"kill:0@running"``.
        seed: Of the schedule; None draws one, which the result names.
        targets: For faults without one: ``"random"`` (a random rank), the number of a rank,
            ``"group"``, ``"standby"``, ``"zygote"``, ``"guardian"``, ``"store"``, ``"logs"``,
            ``"spare"`` (a node without ranks), ``"driver"``.
        points: Injection points for faults without one, each as often as any time; without them
            they come at any time.
        schedule: The faults themselves, in place of *rate*, *faults*, *targets* and *points*.
        callers: Threads that make calls.
        call_timeout: Seconds for each call of the built-in traffic; ranks that have not answered by
            then are restarted.
        keep_intensity: Keep the target's restart intensity. Otherwise it is raised, so that the
            faults of the run do not exceed it. A group that has given up is built again.
        recovery_limit: Seconds in which the group must serve again after the last fault, and the
            callers must have their answers.
        record: The folder for the record of the run; it must be new or empty. None keeps a record
            only of a run that broke an invariant.
    """

    duration: float = 60.0
    rate: float = 1.0
    faults: Sequence[str] = ("kill",)
    seed: int = field(default_factory=_new_seed)
    targets: Sequence[str] = ("random",)
    points: Sequence[str] = ()
    schedule: Schedule | None = None
    callers: int = 4
    call_timeout: float = 5.0
    keep_intensity: bool = False
    recovery_limit: float = 60.0
    record: Path | None = None
    _drawn: Schedule | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        given: Any = self.seed
        self._set("seed", _new_seed() if given is None else given)
        if isinstance(given, bool) or not isinstance(self.seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may err
            raise SpecError("seed", given, "give an integer, or None for a new one")
        for name in ("duration", "rate", "call_timeout", "recovery_limit"):
            check_number(name, getattr(self, name), _LEAST, _MOST)
        check_count("callers", self.callers)
        check_kind("keep_intensity", self.keep_intensity, bool)
        for name, known in (("faults", None), ("targets", TARGETS), ("points", POINTS)):
            self._set(name, _words(name, getattr(self, name), known))
        patterns = [FaultPattern.of(text) for text in self.faults]
        for pattern in patterns:
            pattern.targets_among(self.targets)
        if self.record is not None:
            self._set("record", _new_folder(self.record))
        if self.schedule is None:
            self._set("_drawn", self._draw(patterns))
        elif not isinstance(self.schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may err
            raise SpecError("schedule", self.schedule, "give a Schedule")
        self._check_schedule()

    def _draw(self, patterns: list[FaultPattern]) -> Schedule:
        if not patterns:
            remedy = f"name at least one; there is {', '.join(FAULTS)}"
            raise SpecError("faults", self.faults, remedy)
        for point in self.points:
            refusals = [FAULTS[each.fault].refusal(None, point) for each in patterns]
            if (refusal := refusals[0]) and all(refusals):
                raise refusal
        if self.rate * self.duration > _MOST_FAULTS:
            remedy = f"more than {_MOST_FAULTS} faults in {self.duration:g} s; give less"
            raise SpecError("rate", self.rate, remedy)
        if self.duration < _RECOVERY:
            remedy = f"shorter than one recovery takes ({_RECOVERY:g} s)"
            raise SpecError("duration", self.duration, remedy)
        names = ("duration", "rate", "targets", "points")
        what: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Schedule.draw(self.seed, patterns=patterns, **what)

    @property
    def planned(self) -> Schedule:
        """The schedule, drawn or given."""
        schedule = self.schedule if self._drawn is None else self._drawn
        assert schedule is not None
        return schedule

    @property
    def drawn_from(self) -> int | None:
        """The seed of the schedule; None if that was given."""
        return self.seed if self.schedule is None else None

    @property
    def hits_driver(self) -> bool:
        """Whether a fault hits the driver, which then runs in a process of its own."""
        return any(fault.target == "driver" for fault in self.planned)

    def _check_schedule(self) -> None:
        for fault in self.planned:
            if fault.at >= self.duration:
                remedy = f"fault {fault.number} comes at {fault.at:g} s, after the end"
                raise SpecError("duration", self.duration, remedy)
        cuts = [each.fault for each in self.planned if FAULTS[each.fault].needs == "network"]
        if cuts and self.hits_driver:
            remedy = "would outlive a driver that is killed: give faults of the driver another run"
            raise SpecError(self._source, cuts[0], remedy)

    def check_machine(self) -> None:
        """Raise `SpecError` if a fault cannot be injected on this machine."""
        needing = [each.fault for each in self.planned if FAULTS[each.fault].needs == "gpu"]
        if needing:
            with closing(find_gpus()) as inventory:
                if not inventory.gpus():
                    remedy = "needs an NVIDIA GPU; none is visible here"
                    raise SpecError(self._source, needing[0], remedy)

    @property
    def _source(self) -> str:
        """The field that the faults are from."""
        return "faults" if self.schedule is None else "schedule"

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _words(field_name: str, given: object, known: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names that are *given*, as a list or with commas between them."""
    words: Any = given.split(",") if isinstance(given, str) else given
    if words.__class__ not in (list, tuple) or not all(isinstance(word, str) for word in words):
        raise SpecError(field_name, given, "give a list of names")
    found: tuple[str, ...] = tuple(filter(None, words))
    is_target = field_name == "targets"
    for word in found if known is not None else ():
        if word not in (known or ()) and not (is_target and is_rank(word)):
            or_rank = ", or the number of a rank" if is_target else ""
            remedy = f"unknown; give one of {', '.join(known or ())}{or_rank}"
            raise SpecError(field_name, word, remedy)
    return found


def _new_folder(given: object) -> Path:
    if not isinstance(given, str | Path):
        raise SpecError("record", given, "give a folder")
    folder = Path(given)
    try:
        # A record may not be mixed with another.
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SpecError("record", str(folder), "it exists; name a new folder")
        return folder.resolve()
    except OSError as error:
        raise SpecError("record", str(folder), f"{error.strerror}; name a new folder") from error
