"""One call: its request, its terms, the answers of its ranks and its outcome.

One call: what was asked, of whom, and what has come back; and who looks on at it.

Guarantees: a call is settled once; whoever settles it first wins and everything later is void;
answers are decoded by whoever asks for the result, never by the thread that happened to read them.

Left to others: when calls are sent and who reads (`plane`).

How a call is to be made: whom it goes to, for how long, and what a death of a rank costs it.

Guarantees: terms that make no sense cannot be had.
"""

from __future__ import annotations

import contextlib
import math
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from phalanx.actors.spec.results import Outcome, OutcomeKind
from phalanx.runtime import Frame, Kind, Payload, RemoteFailure
from phalanx.supervision import CallTimeout, SpecError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from phalanx.actors.checkpoint.snapshot import Cut
    from phalanx.runtime import CallFate, CrashReport, Timer

    from .streams import Incoming


OnDeath = Literal["fail", "retry"]
OnTimeout = Literal["leave", "restart"]


class Shape(Enum):
    """Whom a call goes to, and how its answers make one outcome."""

    COLLECTIVE = auto()  # every rank, as a whole
    GATHER = auto()  # every rank, each for itself
    SINGLE = auto()  # one named rank
    POOL = auto()  # any idle rank


class Terms(NamedTuple):
    """How a call is to be treated.

    Attributes:
        deadline: On the monotonic clock; None waits without limit.
        timeout: What the caller gave, for messages; None for no limit.
        retries: How often a death may send the call again.
    """

    deadline: float | None = None
    timeout: float | None = None
    on_death: OnDeath = "fail"
    retries: int = 0
    on_timeout: OnTimeout = "leave"
    tell: bool = False


_KNOWN: dict[tuple[str, int, str, bool], Terms] = {}  # those without a deadline
_MOST_KNOWN = 64


def terms_of(
    *,
    now: float,
    timeout: float | None,
    on_death: OnDeath = "fail",
    retries: int = 1,
    on_timeout: OnTimeout = "leave",
    tell: bool = False,
) -> Terms:
    """Return the terms of a call made *now*, which counts only where there is a *timeout*.

    That has been checked (`check_timeout`).

    Raises:
        SpecError: a negative number of retries, or an unknown policy.
    """
    if timeout == math.inf:
        timeout = None
    key = (on_death, retries, on_timeout, tell)
    if timeout is None and type(retries) is int:
        known = _KNOWN.get(key)
        if known is not None:
            return known
    if on_death not in ("fail", "retry"):
        raise SpecError("on_death", on_death, 'give "fail" or "retry"')
    if on_timeout not in ("leave", "restart"):
        raise SpecError("on_timeout", on_timeout, 'give "leave" or "restart"')
    _check_retries(retries)
    if timeout is not None:
        return Terms(now + timeout, timeout, on_death, retries, on_timeout, tell)
    terms = Terms(None, None, on_death, retries, on_timeout, tell)
    if len(_KNOWN) < _MOST_KNOWN:
        _KNOWN[key] = terms
    return terms


def check_timeout(timeout: Any) -> None:
    """Raise unless *timeout* is a number of seconds; infinity is none."""
    kind = cast("type[object]", type(timeout))
    if issubclass(kind, int | float) and kind is not bool and timeout >= 0:
        return
    remedy = "give seconds >= 0, or None for no limit"
    if issubclass(kind, list | tuple | dict):
        remedy += "; the timeout comes before the method's arguments: give those as args=(...)"
    raise SpecError("timeout", timeout, remedy)


def _check_retries(retries: object) -> None:
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise SpecError("retries", retries, "give an integer >= 0")


class CallTap(Protocol):
    """What looks on at one call, in the driver. Its methods must be quick, and raise nothing."""

    @property
    def method(self) -> Any:
        """What travels to the workers in place of the method."""
        ...

    def issued(self, call: Call) -> None:
        """The call is about to be accepted."""
        ...

    def raised(self, error: BaseException) -> None:
        """Its caller is given *error*: it was not accepted, or nobody waits for its end."""
        ...

    def before_send(self, call: Call, epoch: int, ranks: tuple[tuple[int, int], ...]) -> None:
        """The call is about to go to these (rank, incarnation). Under the plane's lock."""
        ...

    def queued(self) -> None:
        """A rank has it behind others. Under the plane's lock."""
        ...

    def settled(self, call: Call) -> None:
        """The call is done. Under the plane's lock."""
        ...

    def take(self, rank: int, value: Any) -> Any:
        """Return what *rank* answered with, given what came of it."""
        ...


class CallTrace(Protocol):
    """What a call is in OpenTelemetry."""

    def died(self, report: CrashReport, fate: CallFate | None) -> None:
        """A death has touched the call. Under the plane's lock: quick."""
        ...

    def settled(self, call: Call, /) -> None:
        """The call has its outcome. Under the plane's lock: quick."""
        ...

    def end(self, call: Call) -> None:
        """End it with the outcome of *call*, which is done; once."""
        ...

    def refused(self, error: BaseException) -> None:
        """End it by *error*: the call was not accepted, or nobody waits for it any more."""
        ...


class Promise(Protocol):
    """What its caller was given in place of an outcome."""

    @property
    def is_whole(self) -> bool:
        """Whether it has to be told."""
        ...

    def finish(self) -> None:
        """Tell it that the call is done."""
        ...


class Call:
    """One call and its outcome. Guarded by the plane's lock until `done`.

    Attributes:
        payloads: One for all ranks, or one for each.
        want: The rank whose value is wanted; None for every rank's.
        rank: The rank a SINGLE call goes to; where a POOL call went.
        retries: How many deaths may still send it again.
        hang_after: Seconds it may run on a rank; None for no limit.
        stream: What has arrived of its items; None for a call with one answer.
        wire: The number of its latest sending; 0 while it waits for its turn.
        asked: The ranks that the latest sending went to.
        answers: What they have answered.
        error: What it ended with, if not with answers.
        failed: The exception that a rank raised, and that rank.
        reports: The crash reports of the deaths that have cost it an attempt.
        waiters: Who sleeps until it is done (`reading`).
        watchers: What to run once it is done, on whichever thread settles it.
        timer: What ends it at its deadline, where nobody waits for it.
        future: What its caller was given, if that is a future.
        tap: What looks on, where faults are injected; else None.
        span: What it is in OpenTelemetry, where somebody traces; else None.
        cuts: Where it is made to store the ranks' states, those it has begun; else None.
        under_hold: Whether it goes while new calls are held back.
    """

    # Slots, tuples for empty lists, plain assignments: a row of calls makes thousands of these.
    __slots__ = (
        "answers",
        "asked",
        "cuts",
        "done",
        "error",
        "failed",
        "future",
        "hang_after",
        "name",
        "payloads",
        "rank",
        "reports",
        "retries",
        "seq",
        "shape",
        "span",
        "stream",
        "tap",
        "terms",
        "timer",
        "under_hold",
        "waiters",
        "want",
        "watchers",
        "wire",
    )

    def __init__(
        self,
        seq: int,
        name: str,
        shape: Shape,
        payloads: Sequence[Payload],
        terms: Terms,
    ) -> None:
        self.seq = seq
        self.name = name
        self.shape = shape
        self.payloads = payloads
        self.terms = terms
        self.retries = terms.retries if terms.on_death == "retry" else 0
        self.want: int | None = None
        self.rank: int | None = None
        self.hang_after: float | None = None
        self.stream: Incoming | None = None
        self.wire = 0
        self.asked: tuple[int, ...] = ()
        self.answers: dict[int, Frame | Outcome] = {}
        self.error: BaseException | None = None
        self.failed: tuple[Frame, int] | None = None
        self.done = False
        self.reports: tuple[Any, ...] = ()
        self.waiters: tuple[threading.Lock, ...] = ()
        self.watchers: tuple[Callable[[Call], None], ...] = ()
        self.timer: Timer | None = None
        self.future: Promise | None = None
        self.tap: CallTap | None = None
        self.span: CallTrace | None = None
        self.cuts: list[Cut] | None = None
        self.under_hold = False

    def fits(self, size: int) -> bool:
        """Whether a group of *size* ranks can answer it."""
        return (
            len(self.payloads) in (1, size)
            and (self.want is None or self.want < size)
            and (self.rank is None or self.rank < size)
        )

    def misfit(self, size: int) -> SpecError:
        """Return the error of a call that a group of *size* ranks cannot answer."""
        remedy = f"{self.name}: the group was resized to {size} ranks; nothing was sent"
        if self.rank is not None:
            return SpecError("rank", self.rank, remedy)
        if self.want is not None and self.want >= size:
            return SpecError("unique_reply_rank", self.want, remedy)
        return SpecError("world_size", size, f"{remedy}: it was made for {len(self.payloads)}")

    @property
    def missing(self) -> list[int]:
        """The ranks that have been asked and have not answered."""
        return [rank for rank in self.asked if rank not in self.answers]

    def result(
        self, aggregate: Callable[[list[Any], int], Any] | None = None, lead: int = 0
    ) -> Any:
        """Return the value or raise the error of a call that is `done`.

        Decodes the answers: call it once.
        """
        if self.error is not None:
            raise self.error
        if self.failed is not None:
            raise self.fail(*self.failed)
        if self.shape is not _COLLECTIVE:
            if self.shape is Shape.GATHER:
                return [self._outcome(rank) for rank in self.asked]
            assert self.rank is not None
            return self._value(self.rank)
        if aggregate is None and self.want is not None:
            value = self._value(self.want)
            for answer in self.answers.values():
                if isinstance(answer, Frame):
                    answer.drop()
            return value
        if self.tap is not None:
            values = [self._value(rank) for rank in self.asked]
        else:
            answers: dict[int, Any] = self.answers
            values = [answers[rank].value() for rank in self.asked]
        return values if aggregate is None else aggregate(values, lead)

    def fail(self, frame: Frame, rank: int) -> BaseException:
        """Return the exception that *rank* answered with, marked with where it comes from."""
        try:
            failure = frame.value()
        except Exception as broken:  # noqa: BLE001  # a frame that cannot be read is an error too
            return broken
        assert isinstance(failure, RemoteFailure)
        error = failure.revive()
        note = f"raised by rank {rank} in {self.name} (call {self.seq})"
        trace = f"\n{failure.trace.rstrip()}" if failure.trace else ""
        with contextlib.suppress(Exception):  # an exception type may refuse further attributes
            error.add_note(f"{note}; remote traceback:{trace}" if trace else note)
        return error

    def timed_out(self) -> CallTimeout:
        """Return the error of a call whose deadline has passed."""
        has_run = self.terms.on_death == "retry" and self.retries < self.terms.retries
        aimed = [] if self.rank is None or has_run else [self.rank]
        ranks = self.missing if self.wire else aimed
        return CallTimeout(
            self.name,
            ranks,
            self.terms.timeout or 0.0,
            sent=bool(self.wire) or has_run,
            reports=self.reports,
        )

    def drop(self) -> None:
        """Give back what the call still holds."""
        for payload in self.payloads:
            if payload.flags:
                payload.close()

    def _value(self, rank: int) -> Any:
        frame = self.answers[rank]
        assert isinstance(frame, Frame)
        value = frame.value()
        return value if self.tap is None else self.tap.take(rank, value)

    def _outcome(self, rank: int) -> Outcome:
        answer = self.answers[rank]
        if isinstance(answer, Outcome):
            return answer
        if answer.kind == Kind.ERROR:
            return Outcome(rank, OutcomeKind.ERROR, error=self.fail(answer, rank))
        try:
            value = answer.value()
            if self.tap is not None:
                value = self.tap.take(rank, value)
            return Outcome(rank, OutcomeKind.OK, value)
        except Exception as error:  # noqa: BLE001  # a reply whose type cannot be rebuilt here
            return Outcome(rank, OutcomeKind.ERROR, error=error)


_COLLECTIVE = Shape.COLLECTIVE  # to look a member of an enum up takes as long as a call
