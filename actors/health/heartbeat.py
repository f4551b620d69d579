"""Asking ranks for a sign of life from outside their main loops.

Guarantees: a question costs each rank one packet each way and nobody anything once it is closed;
it is put and answered without the executor's actor, which may have its hands full with the dead;
an answer to a question nobody asks any more is dropped.

Left to others: the worker's side (`runtime.pulse`), what silence means (`health`).
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from phalanx.runtime import Kind, OwnedLock, Payload, Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from phalanx.runtime import Frame

PATIENCE = 1.0
"""Seconds for an answer, a thousand times what it takes: the machine may have more to do."""

_NOTHING = Payload.of(None)


@dataclass(frozen=True, slots=True)
class Sign:
    """What came of asking one rank.

    Attributes:
        pulse: What it said; None where it has said nothing.
        after: Seconds that took, or since it was asked.
    """

    pulse: Pulse | None
    after: float


class Question:
    """One question, put to some ranks; close it, or use it as a context manager."""

    def __init__(self, pulses: Pulses, number: int, ranks: frozenset[int]) -> None:
        self._pulses = pulses
        self._number = number
        self._ranks = ranks
        self._answers: dict[int, tuple[Pulse, float]] = {}
        self._changed = threading.Condition()
        self._then: list[Callable[[], None]] = []
        self._at = time.monotonic()

    def wait(self, ranks: Collection[int], deadline: float) -> None:
        """Return once these *ranks* have answered, or at *deadline* (monotonic)."""
        with self._changed:
            patience = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._answers.keys() >= set(ranks), patience)

    def when_answered(self, then: Callable[[], None]) -> None:
        """Run *then* once every rank has answered; on whichever thread hears of it: be quick."""
        with self._changed:
            if not self._is_answered():
                self._then.append(then)
                return
        then()

    def signs(self) -> dict[int, Sign]:
        """Return what is known by now."""
        silence = Sign(None, time.monotonic() - self._at)
        with self._changed:
            answers = dict(self._answers)
        return {rank: Sign(*answers[rank]) if rank in answers else silence for rank in self._ranks}

    def close(self) -> None:
        """Wait for no more answers."""
        self._pulses.forget(self._number)

    def hear(self, rank: int, pulse: Pulse) -> None:
        """Note what *rank* has answered."""
        with self._changed:
            self._answers[rank] = pulse, time.monotonic() - self._at
            self._changed.notify_all()
            if not self._is_answered():
                return
            then, self._then = self._then, []
        for each in then:
            each()

    def _is_answered(self) -> bool:
        return self._answers.keys() >= self._ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pulses:
    """The ranks that can be asked, and the questions that are open."""

    def __init__(self) -> None:
        self._lock = OwnedLock()
        self._numbers = itertools.count(1)
        self._ways: dict[int, tuple[int, Callable[[bytes], object]]] = {}
        self._open: dict[int, Question] = {}

    def enter(self, rank: int, incarnation: int, send: Callable[[bytes], object]) -> None:
        """Have *rank* asked by *send*, which takes a packet and does not wait."""
        with self._lock.asked():
            self._ways[rank] = incarnation, send

    def leave(self, rank: int, incarnation: int) -> None:
        """Ask that incarnation no more, if it ever was here; then nobody is using its way."""
        with self._lock.asked():
            known, _ = self._ways.get(rank, (None, None))
            if known == incarnation:
                del self._ways[rank]

    def ask(self, ranks: Mapping[int, int]) -> Question:
        """Ask these (rank: incarnation); those that are not here any more stay silent."""
        number = next(self._numbers)
        question = Question(self, number, frozenset(ranks))
        with self._lock.asked():
            self._open[number] = question
            self._send(ranks, _NOTHING.packet(Kind.ASK, epoch=0, call_id=number))
        return question

    def part(self, ranks: Mapping[int, int], epoch: int) -> None:
        """Have these (rank: incarnation) cut from the process group they leave for *epoch*."""
        with self._lock.asked():
            self._send(ranks, _NOTHING.packet(Kind.PART, epoch=epoch, call_id=0))

    def tell_draining(self) -> None:
        """Tell every rank that it will be stopped in good order: SIGTERM is not to end it now."""
        with self._lock.asked():
            ranks = {rank: known for rank, (known, _) in self._ways.items() if rank >= 0}
            self._send(ranks, _NOTHING.packet(Kind.DRAINING, epoch=0, call_id=0))

    def _send(self, ranks: Mapping[int, int], packet: bytes) -> None:
        for rank, incarnation in ranks.items():
            known, send = self._ways.get(rank, (None, None))
            if known == incarnation and send is not None:
                # Full or broken: then it is not for want of questions that it is silent.
                with suppress(OSError):
                    send(packet)

    def hear(self, rank: int, frame: Frame) -> None:
        """Take *rank*'s answer to where it is waited for."""
        with self._lock.asked():
            question = self._open.get(frame.call_id)
        if question is None:
            frame.drop()
            return
        pulse: object = None
        with suppress(Exception):  # one that cannot be read is no sign of life
            pulse = frame.value()
        if isinstance(pulse, Pulse):
            question.hear(rank, pulse)

    def forget(self, number: int) -> None:
        """Close the question of that number."""
        with self._lock.asked():
            self._open.pop(number, None)
