"""`Chaos`: what a run is to be, checked when it is built.

Guarantees: a plan that exists makes sense; what it leaves open (the seed) is settled when it is
built, so that it can be run again.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phalanx.actors import POINTS
from phalanx.runtime import find_gpus
from phalanx.supervision import SpecError

from .faults import (
    FAULTS,
    TARGETS,
    Aim,
    Fault,
    check_point,
    is_rank,
)
from .schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence


_LONGEST = 1e9  # seconds, thirty years; Python's locks can wait for ten times that
_MOST_STRIKES = 100_000  # arbitrary; a history of so many is more than memory holds


def _seed() -> int:
    return random.SystemRandom().randrange(1 << 31)


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """What is done to a target, for how long, and what is expected of it.

    Attributes:
        duration: Seconds of faults and traffic; the start and the end of the target come on top.
        rate: Faults per second, on average, at random moments.
        faults: Which: names, as ``"kill"``, ``"kill:zygote"`` or ``"kill:0@running"``.
        seed: What the schedule is drawn from; None draws one, which the result tells.
        targets: For faults without one of their own: ``"random"`` (a random rank), a rank's number,
            ``"standby"``, ``"group"``, ``"zygote"``, ``"store"``, ``"logs"``, ``"driver"``.
        points: Moments that faults without one of their own may be aimed at; none for any time.
        schedule: The faults themselves, in place of *rate*, *faults*, *targets* and *points*.
        callers: Threads that make calls.
        call_timeout: Seconds for each call of the traffic that is made where a target brings none
            of its own; the ranks that have not answered by then are restarted.
        keep_intensity: Let the target keep its restart intensity. Otherwise it is widened, so that
            the faults of the run are not too many; a group that has given up is built again.
        recovery_limit: Seconds in which the group must serve again after the last fault, and the
            callers must have their answers.
        record: The folder that the run leaves its record in; it must not be there yet, or be
            empty. None keeps a record only of a run that broke something.
    """

    duration: float = 60.0
    rate: float = 1.0
    faults: Sequence[str] = ("kill",)
    seed: int = field(default_factory=_seed)
    targets: Sequence[str] = ("random",)
    points: Sequence[str] = ()
    schedule: Schedule | None = None
    callers: int = 4
    call_timeout: float = 5.0
    keep_intensity: bool = False
    recovery_limit: float = 60.0
    record: Path | None = None

    def __post_init__(self) -> None:
        given: Any = self.seed
        _settle(self, "seed", _seed() if given is None else given)
        for name in ("duration", "rate", "call_timeout", "recovery_limit"):
            _check_above_zero(name, getattr(self, name))
            if name != "rate" and getattr(self, name) > _LONGEST:
                raise SpecError(name, getattr(self, name), f"give at most {_LONGEST:g} seconds")
        _check_integer("seed", self.seed, "give an integer, or None for a new one")
        _check_integer("callers", self.callers, "give an integer >= 1", least=1)
        for name in ("faults", "targets", "points"):
            _settle(self, name, _names(name, getattr(self, name)))
        aims = [Aim.of(text) for text in self.faults]
        if not aims and self.schedule is None:
            raise SpecError(
                "faults", self.faults, f"name at least one; there is {', '.join(FAULTS)}"
            )
        self._check_targets()
        for aim in aims:
            aim.targets_among(self.targets)
        self._check_points([FAULTS[aim.fault] for aim in aims])
        if self.record is not None:
            _settle(self, "record", _check_folder(self.record))
        schedule = self.schedule
        if schedule is None:
            self._check_duration({aim.fault for aim in aims})
            if self.rate * self.duration > _MOST_STRIKES:
                remedy = f"more than {_MOST_STRIKES} faults in {self.duration:g} s; give less"
                raise SpecError("rate", self.rate, remedy)
            schedule = Schedule.draw(
                self.seed,
                duration=self.duration,
                rate=self.rate,
                aims=aims,
                targets=self.targets,
                points=self.points,
            )
            _settle(self, "schedule", schedule)
        else:
            if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may err
                raise SpecError("schedule", schedule, "give a Schedule")
            self._check_duration({strike.fault for strike in schedule})
            late = [strike for strike in schedule if strike.at >= self.duration]
            if late:
                what = f"strike {late[0].number} comes at {late[0].at:g} s, after the end"
                raise SpecError("duration", self.duration, what)
        self._check_machine({aim.fault for aim in aims} | {strike.fault for strike in schedule})

    @property
    def strikes(self) -> Schedule:
        """The schedule, drawn or given."""
        assert self.schedule is not None
        return self.schedule

    @property
    def hits_driver(self) -> bool:
        """Whether some fault is done to the driver, which then needs a process of its own."""
        return any(strike.target == "driver" for strike in self.strikes)

    def _check_targets(self) -> None:
        for target in self.targets:
            if target not in TARGETS and not is_rank(target):
                there = ", ".join(TARGETS)
                remedy = f"no such target; there is {there}, or a rank's number"
                raise SpecError("targets", target, remedy)

    def _check_points(self, faults: Sequence[Fault]) -> None:
        for point in self.points:
            if point not in POINTS:
                there = ", ".join(POINTS)
                raise SpecError("points", point, f"no such point; there is {there}")
            if faults and not any(point in fault.points for fault in faults):
                check_point(faults[0], point)

    def _check_duration(self, faults: set[str]) -> None:
        for name in sorted(faults):
            fault = FAULTS[name]
            least = fault.recovery + (min(fault.seconds, self.call_timeout) if fault.hangs else 0.0)
            if self.duration < least:
                remedy = f"shorter than one recovery from {name} takes ({least:g} s)"
                raise SpecError("duration", self.duration, remedy)

    def _check_machine(self, faults: set[str]) -> None:
        needing = sorted(name for name in faults if FAULTS[name].needs == "gpu")
        if needing:
            inventory = find_gpus()
            gpus = inventory.gpus()
            inventory.close()
            if not gpus:
                raise SpecError("faults", needing[0], "needs an NVIDIA GPU; none is visible here")


def _settle(plan: Chaos, name: str, value: object) -> None:
    object.__setattr__(plan, name, value)


def _names(field_name: str, given: object) -> tuple[str, ...]:
    whole = given  # keeps its type: what isinstance makes of it, one checker does not know
    if isinstance(given, str):
        return tuple(word for word in given.split(",") if word)
    if not isinstance(given, list | tuple):
        raise SpecError(field_name, whole, "give a list of names")
    names = cast("Sequence[object]", given)
    if not all(isinstance(each, str) for each in names):
        raise SpecError(field_name, whole, "give a list of names")
    return tuple(cast("Sequence[str]", given))


def _check_integer(name: str, value: object, remedy: str, *, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(name, value, remedy)
    if least is not None and value < least:
        raise SpecError(name, value, remedy)


def _check_above_zero(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(cast("float", value)) or cast("float", value) <= 0:
        raise SpecError(name, value, "give a number above 0")


def _check_folder(given: object) -> Path:
    if not isinstance(given, str | Path):
        raise SpecError("record", given, "give a folder")
    folder = Path(given)
    # A record may not be mixed with another.
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError("record", str(folder), "is there already; name one that is not")
    return folder.resolve()
