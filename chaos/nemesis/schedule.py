"""The schedule: the faults of a run with their targets and times.

Guarantees: the same seed and arguments give the same schedule on any machine; a schedule survives
JSON, and any part of one is a schedule.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx.chaos.history.events import FaultInjected, FaultMissed
from phalanx.chaos.history.journal import now
from phalanx.supervision import SpecError, check_count, check_number

from .catalog import FAULTS, FaultPattern, fault_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SPREAD = 0.5  # how far, as a part of it, a fault's length is drawn from its usual one
_WIDE = 8.0  # and of a node: as a factor, since `node_timeout`, from which it matters, is unknown
_MOST = 1e9  # seconds; Python's locks wait for ten times that
_MOST_OF_DRIVER = 8.0  # seconds of a stop; from 10 on, deaths and deadlines would be seen too late
_LAST = 0.999999  # the greatest draw below 1, which rounding may reach


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledFault:
    """One fault to inject.

    Attributes:
        number: Its place in the original schedule, which it keeps in every part of that.
        at: Seconds after the group came up. With a *point*, the next such moment counts from then.
        target: One of `TARGETS`, or the number of a rank.
        draw: In [0, 1): selects the rank of a random target.
        point: The injection point; empty for any time.
        seconds: How long it lasts, if it does.
    """

    number: int
    at: float
    fault: str
    target: str = "random"
    draw: float = 0.0
    point: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        fault = fault_named("fault", self.fault)
        given: Any = self.target
        if type(given) is int:  # a rank
            object.__setattr__(self, "target", str(given))
        elif type(given) is not str:
            raise SpecError("target", given, "give a name, or the number of a rank")
        if refusal := fault.refusal(self.target, self.point):
            raise refusal
        for field in ("at", "draw", "seconds"):
            check_number(field, getattr(self, field), 0.0, _MOST)
        if self.draw >= 1:
            raise SpecError("draw", self.draw, "give a number in [0, 1)")
        check_count("number", self.number)
        if (self.fault, self.target) == ("stop", "driver") and self.seconds > _MOST_OF_DRIVER:
            remedy = f"the checks of time allow {_MOST_OF_DRIVER:g} s for a driver that is stopped"
            raise SpecError("seconds", self.seconds, remedy)

    def injected(self, **victim: Any) -> FaultInjected:
        """Return the event of its injection into *victim* now."""
        fields: dict[str, Any] = {"lethal": FAULTS[self.fault].lethal, **victim}
        return FaultInjected(**self._named(), point=self.point, **fields)

    def missed(self, why: str) -> FaultMissed:
        """Return the event that it could not be injected."""
        return FaultMissed(**self._named(), why=why)

    def _named(self) -> dict[str, Any]:
        return {"at": now(), "number": self.number, "fault": self.fault, "target": self.target}


@dataclass(frozen=True, slots=True)
class Schedule:
    """The faults of one run, by time."""

    faults: tuple[ScheduledFault, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(sorted(self.faults, key=lambda each: each.at)))
        for number, count in Counter(each.number for each in self.faults).most_common(1):
            if count > 1:
                raise SpecError("number", number, "give each fault its own, or none any")

    def __iter__(self) -> Iterator[ScheduledFault]:
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)

    @classmethod
    def draw(
        cls,
        seed: int,
        *,
        duration: float,
        rate: float,
        patterns: Sequence[FaultPattern],
        targets: Sequence[str] = ("random",),
        points: Sequence[str] = (),
    ) -> Schedule:
        """Return the schedule of *seed*: *rate* faults per second, at random, for *duration*.

        At least one, since a run without faults shows nothing.

        Args:
            patterns: The patterns to draw from, with equal probability.
            targets: For patterns without a target.
            points: For patterns without a point: each of these, or none, if the fault can have it.

        Raises:
            SpecError: a pattern can have none of *targets*.
        """
        chance = random.Random(seed)  # noqa: S311  # reproducible, not secret
        faults: list[ScheduledFault] = []
        at = chance.expovariate(rate)
        if at >= duration:
            at = chance.uniform(0.0, duration / 2)
        while at < duration:
            pattern = chance.choice(patterns)
            fault = FAULTS[pattern.fault]
            target = pattern.target or chance.choice(pattern.targets_among(targets))
            moments = ["", *(each for each in points if each in fault.points_of(target))]
            point = chance.choice(moments) if pattern.point is None else pattern.point
            away = chance.uniform(-1.0, 1.0)
            length = fault.seconds * (_WIDE**away if fault.how == "node" else 1 + _SPREAD * away)
            faults.append(
                ScheduledFault(
                    number=len(faults) + 1,
                    at=math.floor(at * 1000) / 1000,  # rounded up it might come after the end
                    fault=pattern.fault,
                    target=target,
                    draw=min(round(chance.random(), 6), _LAST),
                    point=point,
                    seconds=round(length, 3),
                )
            )
            at += chance.expovariate(rate)
        return cls(tuple(faults))

    def only(self, numbers: Sequence[int]) -> Schedule:
        """Return the part of it that has these numbers."""
        kept = set(numbers)
        return Schedule(tuple(each for each in self.faults if each.number in kept))

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps([asdict(each) for each in self.faults], indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return the schedule of *text*, which `to_json` or a person has written.

        A fault without ``seconds`` lasts for its default time.

        Raises:
            SpecError: *text* is no schedule, or names something unknown.
        """
        try:
            entries: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError("schedule", text[:80], f"not JSON: {error}") from error
        if entries.__class__ is not list:
            raise SpecError("schedule", text[:80], "give a list of faults")
        return cls(tuple(map(_fault_of, range(len(entries)), entries)))


def _fault_of(index: int, entry: Any) -> ScheduledFault:
    """Return the fault of an *entry* of a schedule in JSON."""
    try:
        fields: dict[str, Any] = {"number": index + 1, **entry}
        fault = FAULTS.get(fields.get("fault", ""))
        fields.setdefault("seconds", fault.seconds if fault else 0.0)
        return ScheduledFault(**fields)
    except SpecError:
        raise
    except (TypeError, ValueError) as error:
        raise SpecError(f"schedule[{index}]", entry, f"not a fault: {error}") from error
