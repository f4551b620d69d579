"""What ranks that hang were doing, found out before they are ended.

Guarantees: they are asked for a sign of life first, and whoever gives none is not waited for longer
than a moment. A rank that has gone on with other work meanwhile is let go. Where some of them only
wait in a collective operation for another, that other alone is ended, once its own time is over: it
is the one that hangs, and the rest comes free by its death.

Left to others: when a rank is suspected (`watch`), ending it (`stopping`).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phalanx.runtime import Vitals

from .notices import Examined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.runtime import Hub

    from .member import Member
    from .pulses import Pulses, Question, Sign
    from .seat import Running

_PATIENCE = 0.5  # seconds for a sign of life; one that can give it does so within milliseconds


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank that seems to hang.

    Attributes:
        why: What speaks for it.
        holds: Whether that is still so.
        in_call: Whether it is suspected for the time that a call takes.
    """

    rank: int
    incarnation: int
    why: str
    holds: Callable[[], bool]
    in_call: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank that is to be ended, why, and what it was found doing."""

    member: Member
    why: str
    seen: str


class Examinations:
    """Those that are under way. Used by the executor's actor alone."""

    def __init__(
        self,
        pulses: Pulses,
        hub: Hub,
        tell: Callable[[Examined], None],
        find: Callable[[int, int], Member | None],
    ) -> None:
        self._pulses = pulses
        self._hub = hub
        self._tell = tell
        self._find = find
        self._numbers = itertools.count(1)
        self._open: dict[int, _Case] = {}

    def begin(self, suspects: Sequence[Suspect], running: Sequence[Running] = ()) -> None:
        """Ask *suspects*; `Examined` is told when they have answered, or have had their time.

        The others of those *running*, which owe answers, are asked as witnesses.
        """
        known = {
            (each.rank, each.incarnation) for case in self._open.values() for each in case.suspects
        }
        batch = [each for each in suspects if (each.rank, each.incarnation) not in known]
        if not batch:
            return
        notice = Examined(next(self._numbers))
        accused = {each.rank for each in batch}
        witnesses = [each for each in running if each.rank not in accused]
        everyone = {each.rank: each.incarnation for each in witnesses}
        everyone |= {each.rank: each.incarnation for each in batch}
        asked = {
            rank: incarnation
            for rank, incarnation in everyone.items()
            if not self._is_stopped(rank, incarnation)
        }
        question = self._pulses.ask(asked)
        self._open[notice.number] = _Case(question, batch, witnesses)
        question.when_answered(lambda: self._tell(notice))
        self._hub.call_at(time.monotonic() + _PATIENCE, lambda: self._tell(notice))

    def end(self, notice: Examined) -> tuple[list[Finding], bool]:
        """Return who is to be ended, and whether others were let go: look at those again."""
        case = self._open.pop(notice.number, None)
        if case is None:
            return [], False  # it had been answered before its time was over
        signs = case.question.signs()
        case.question.close()
        found: list[Finding] = []
        waiting: list[Finding] = []
        let_go = False
        for suspect in case.suspects:
            member = self._find(suspect.rank, suspect.incarnation)
            if member is None or member.process is None:
                continue
            if not suspect.holds():
                let_go = True
                continue
            sign = signs.get(suspect.rank)
            finding = Finding(member, suspect.why, _describe(sign, member.process.pid))
            (waiting if suspect.in_call and _waits(sign) else found).append(finding)
        others_hang = bool(found)
        for witness in case.witnesses if waiting else ():
            sign = signs.get(witness.rank)
            member = self._find(witness.rank, witness.incarnation)
            if _waits(sign) or member is None or member.process is None:
                continue
            if witness.limit is not None:
                others_hang = True  # its own time will be over soon
            elif not witness.began and (sign is None or sign.pulse is None):
                others_hang = True
                why = "others wait for it in a call that it has not begun"
                found.append(Finding(member, why, _describe(sign, member.process.pid)))
        return (found, True) if others_hang and waiting else ([*found, *waiting], let_go)

    def _is_stopped(self, rank: int, incarnation: int) -> bool:
        member = self._find(rank, incarnation)
        return member is None or member.process is None or member.process.is_stopped()


@dataclass(frozen=True, slots=True)
class _Case:
    question: Question
    suspects: Sequence[Suspect]
    witnesses: Sequence[Running]


def _waits(sign: Sign | None) -> bool:
    """Whether a rank waits in a collective operation for the others."""
    return sign is not None and sign.pulse is not None and sign.pulse.is_in_collective


def _describe(sign: Sign | None, pid: int) -> str:
    """Return what a rank is doing, from its answer and from what the kernel shows."""
    if sign is None:
        return ""  # stopped, which is why it is suspected
    vitals = Vitals.of(pid)
    place = f" in {vitals.wait}" if vitals.wait else ""
    if sign.pulse is not None:
        return f"{'busy' if vitals.state == 'R' else 'waiting'} in {sign.pulse}"
    if vitals.state == "D":
        return f"wedged in uninterruptible sleep{place}"
    doing = "uses the processor" if vitals.state == "R" else f"sleeps{place}"
    silence = f"no sign of life within {sign.after:.2g} s"
    return f"wedged: {silence}, so native code holds the interpreter lock; it {doing}"
