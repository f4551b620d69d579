"""What is done to whom and when: a value, drawn from a seed or given as a list.

Guarantees: the same seed and the same arguments give the same schedule, on any machine, whatever
happens in the run; a schedule survives JSON, and can be cut down to any part of it.

Left to others: doing it (`striker`).
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx.supervision import SpecError

from .faults import (
    FAULTS,
    Aim,
    check_point,
    check_target,
    is_rank,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SPREAD = 0.5  # how far, as a part of it, a fault's length is drawn from its usual one


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One fault to be done.

    Attributes:
        number: Its place in the schedule it was drawn in; it keeps it in every part of that.
        at: Seconds after the group has come up. With a *point* it is from then on that the next
            such moment counts.
        target: One of `TARGETS`, or a rank's number.
        draw: In [0, 1): which rank a random one is, whatever their number.
        point: The moment it is aimed at; empty for any.
        seconds: How long it lasts, where it does.
    """

    number: int
    at: float
    fault: str
    target: str = "random"
    draw: float = 0.0
    point: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        fault = FAULTS.get(self.fault)
        if fault is None:
            raise SpecError("fault", self.fault, f"no such fault; there is {', '.join(FAULTS)}")
        given: Any = self.target
        if type(given) is int:  # a rank, as people write it
            object.__setattr__(self, "target", str(given))
        elif type(given) is not str:
            raise SpecError("target", given, "give a name, or a rank's number")
        check_target(fault, self.target)
        if self.point:
            check_point(fault, self.point)
        for field in ("at", "draw", "seconds"):
            value = getattr(self, field)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise SpecError(field, value, "give a number >= 0")
        if self.draw >= 1:
            raise SpecError("draw", self.draw, "give a number in [0, 1)")
        if type(self.number) is not int or self.number < 1:
            raise SpecError("number", self.number, "give a whole number >= 1")

    @property
    def is_from_outside(self) -> bool:
        """Whether whoever has started the driver does it, rather than the driver or a worker."""
        aimed_at_nothing = self.target == "driver" and not self.point
        return aimed_at_nothing and FAULTS[self.fault].how == "signal"

    def rank(self, world_size: int) -> int:
        """Return the rank it is for, in a group of *world_size*, which may have no such rank."""
        if is_rank(self.target):
            return int(self.target)
        return int(self.draw * world_size)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The strikes of one run, by time."""

    strikes: tuple[Strike, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "strikes", tuple(sorted(self.strikes, key=lambda s: s.at)))
        # A fault that waits for its moment is taken by its number, once.
        numbers = Counter(strike.number for strike in self.strikes)
        for number, strikes in numbers.most_common(1):
            if strikes > 1:
                raise SpecError("number", number, "give each strike one of its own, or none any")

    def __iter__(self) -> Iterator[Strike]:
        return iter(self.strikes)

    def __len__(self) -> int:
        return len(self.strikes)

    @classmethod
    def draw(
        cls,
        seed: int,
        *,
        duration: float,
        rate: float,
        aims: Sequence[Aim],
        targets: Sequence[str] = ("random",),
        points: Sequence[str] = (),
    ) -> Schedule:
        """Return the schedule of *seed*: *rate* strikes per second, at random, for *duration*.

        One at least: a run without any would hold, and show nothing.

        Args:
            aims: What is drawn from, one as likely as another.
            targets: For aims without a target.
            points: For aims without a point: each of these, or none, where the fault has it.

        Raises:
            SpecError: there is an aim that can be done to none of *targets*.
        """
        chance = random.Random(seed)  # noqa: S311  # drawn to be drawn again
        whom = {aim: aim.targets_among(targets) for aim in aims}
        strikes: list[Strike] = []
        at = chance.expovariate(rate)
        if at >= duration:
            at = chance.uniform(0.0, duration / 2)
        while at < duration:
            aim = chance.choice(aims)
            fault = FAULTS[aim.fault]
            target = aim.target or chance.choice(whom[aim])
            moments = ["", *(point for point in points if point in fault.points)]
            point = chance.choice(moments) if aim.point is None else aim.point
            length = fault.seconds * chance.uniform(1 - _SPREAD, 1 + _SPREAD)
            strikes.append(
                Strike(
                    number=len(strikes) + 1,
                    at=math.floor(at * 1000) / 1000,  # rounded up it might come after the end
                    fault=aim.fault,
                    target=target,
                    draw=round(chance.random(), 6),
                    point=point,
                    seconds=round(length, 3),
                )
            )
            at += chance.expovariate(rate)
        return cls(tuple(strikes))

    def only(self, numbers: Sequence[int]) -> Schedule:
        """Return the part of it that has these numbers."""
        wanted = set(numbers)
        return Schedule(tuple(strike for strike in self.strikes if strike.number in wanted))

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps([asdict(strike) for strike in self.strikes], indent=1)

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Return the schedule that `to_json` made *text* of, or that somebody wrote by hand.

        What lasts, lasts for the fault's usual time where no ``seconds`` are given.

        Raises:
            SpecError: it is none, or names what there is not.
        """
        try:
            entries: list[Any] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError("schedule", text[:80], f"not JSON: {error}") from error
        if entries.__class__ is not list:
            raise SpecError("schedule", text[:80], "give a list of strikes")
        strikes: list[Strike] = []
        for index, entry in enumerate(entries):
            fields: dict[str, Any] = {"number": index + 1}
            try:
                fields.update(entry)
                fault = FAULTS.get(fields.get("fault", ""))
                fields.setdefault("seconds", 0.0 if fault is None else fault.seconds)
                strikes.append(Strike(**fields))
            except (TypeError, ValueError) as error:
                if isinstance(error, SpecError):
                    raise
                raise SpecError(f"schedule[{index}]", entry, f"not a strike: {error}") from error
        return cls(tuple(strikes))
