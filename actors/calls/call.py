"""`Call`: one call with its options, the answers of its ranks and its outcome.

- A call is settled once: the first settlement counts, everything later is void.
- Answers are decoded by the thread that asks for the result, not by the thread that read them.
- Invalid options are refused (`options_of`).
"""

from __future__ import annotations

import contextlib
import math
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from phalanx.actors.spec.results import Outcome, OutcomeKind
from phalanx.runtime import Frame, Kind, Payload, RemoteFailure
from phalanx.supervision import CallTimeout, SpecError, check_count

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from phalanx.actors.checkpoint.snapshot_store import Snapshot
    from phalanx.actors.observe.hooks import CallProbe
    from phalanx.actors.observe.tracing import CallSpan
    from phalanx.runtime import Timer

    from .futures import CallFuture
    from .streams import StreamInbox


OnTimeout = Literal["leave", "restart"]


class Shape(Enum):
    """The ranks that a call goes to, and how their answers make one outcome."""

    COLLECTIVE = auto()  # every rank, as a whole
    GATHER = auto()  # every rank, each for itself
    SINGLE = auto()  # one named rank
    POOL = auto()  # any idle rank


COLLECTIVE, GATHER, SINGLE, POOL = Shape  # looking a member up takes as long as a call


class CallOptions(NamedTuple):
    """The options of a call.

    Attributes:
        deadline: On the monotonic clock; None waits without limit.
        timeout: The seconds that the caller gave, for messages; None for no limit.
        retries: How many deaths may send the call again after a rank had begun it.
        on_timeout: ``"restart"`` treats ranks that have not answered in time as hung.
        tell: Whether the caller discards the outcome.
    """

    deadline: float | None = None
    timeout: float | None = None
    retries: int = 0
    on_timeout: OnTimeout = "leave"
    tell: bool = False


DEFAULT = CallOptions()


def options_of(
    *,
    now: float,
    timeout: float | None,
    retries: int = 0,
    on_timeout: OnTimeout = "leave",
    tell: bool = False,
) -> CallOptions:
    """Return the options of a call made *now*, which counts only with a *timeout*.

    *timeout* has been checked (`check_timeout`).

    Raises:
        SpecError: a negative number of retries, or an unknown policy.
    """
    check_count("retries", retries, 0)
    if on_timeout not in ("leave", "restart"):
        raise SpecError("on_timeout", on_timeout, 'give "leave" or "restart"')
    if timeout is None or timeout == math.inf:
        return CallOptions(None, None, retries, on_timeout, tell)
    return CallOptions(now + timeout, timeout, retries, on_timeout, tell)


def check_timeout(timeout: Any) -> None:
    """Raise unless *timeout* is a number of seconds; infinity is no limit."""
    kind = cast("type[object]", type(timeout))
    if issubclass(kind, int | float) and kind is not bool and timeout >= 0:
        return
    remedy = "give seconds >= 0, or None for no limit"
    if issubclass(kind, list | tuple | dict):
        remedy += "; the timeout comes before the method's arguments: give those as args=(...)"
    raise SpecError("timeout", timeout, remedy)


class Call:
    """One call and its outcome. Guarded by the plane's lock until `done`.

    Attributes:
        payloads: One for all ranks, or one for each.
        want: The rank whose value is wanted; None for every rank's.
        of_output: Whether *want*, or *lead*, is the output rank that there is when it is sent.
        aggregate: Given all values and *lead*, returns the value; None for the list of them.
        size: The number of ranks that it was made for; None for any.
        rank: The rank a SINGLE call goes to; the rank a POOL call went to.
        retries: How many deaths may still send it again.
        hang_after: Seconds it may run on a rank; None for no limit.
        stream: The items that have arrived; None for a call with one answer.
        wire: The number of its latest sending; 0 while it is queued.
        asked: The ranks of the latest sending.
        answers: Their answers.
        error: The error that it was settled with, in place of answers.
        failed: The exception that a rank raised, and that rank.
        reports: The crash reports of the deaths that have cost it an attempt.
        waiters: Locks of the threads that wait for it (`Reader`).
        watchers: Run when it is settled, on the thread that settles it.
        made_at: When it was made, where calls are counted (`CallMeter`); else 0.0.
        timer: Settles it at its deadline, where no caller waits for it.
        future: The caller's future, if there is one.
        probe: Observer for fault injection; else None.
        span: Its OpenTelemetry span, if it is traced; else None.
        snapshots: The snapshots that it has begun, if it was made to take one; else None.
        under_hold: Whether it is sent while dispatch is paused, before the calls that wait.
    """

    # Slots, tuples for empty lists, plain assignments: a pipeline makes thousands of these.
    __slots__ = (
        *("aggregate", "answers", "asked", "done", "error", "failed", "future", "hang_after"),
        *("lead", "made_at", "name", "of_output", "options", "payloads", "probe", "rank"),
        *("reports", "retries", "seq", "shape", "size", "snapshots", "span", "stream", "timer"),
        *("under_hold", "waiters", "want", "watchers", "wire"),
    )

    def __init__(
        self,
        seq: int,
        name: str,
        shape: Shape,
        payloads: Sequence[Payload],
        options: CallOptions,
    ) -> None:
        self.seq = seq
        self.name = name
        self.shape = shape
        self.payloads = payloads
        self.options = options
        self.retries = options.retries
        self.want: int | None = None
        self.aggregate: Callable[[list[Any], int], Any] | None = None
        self.lead = 0
        self.of_output = False
        self.size: int | None = None
        self.rank: int | None = None
        self.hang_after: float | None = None
        self.stream: StreamInbox | None = None
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
        self.future: CallFuture | None = None
        self.probe: CallProbe | None = None
        self.span: CallSpan | None = None
        self.snapshots: list[Snapshot] | None = None
        self.under_hold = False
        self.made_at = 0.0

    def follow(self, output_rank: int) -> None:
        """Take the answer of *output_rank*, or have it lead."""
        if self.aggregate is None:
            self.want = output_rank
        else:
            self.lead = output_rank

    def fits(self, size: int) -> bool:
        """Whether a group of *size* ranks can answer it."""
        return (
            self.size in (None, size)
            and max(self.lead, self.want or 0) < size
            and (self.rank is None or self.rank < size)
        )

    def misfit(self, size: int) -> SpecError:
        """Return the error of a call that a group of *size* ranks cannot answer."""
        remedy = f"{self.name}: the group was resized to {size} ranks; nothing was sent"
        if self.rank is not None:
            return SpecError("rank", self.rank, remedy)
        if self.size is None:
            return SpecError("unique_reply_rank", max(self.lead, self.want or 0), remedy)
        return SpecError("world_size", size, f"{remedy}: it was made for {self.size}")

    def void(self) -> Call:
        """Return what stands for it, once it is done, on the lists of ranks that still owe it."""
        void = Call(self.seq, self.name, self.shape, (), self.options)
        void.hang_after = self.hang_after
        void.done = True
        return void

    @property
    def missing(self) -> list[int]:
        """The ranks of the latest sending that have not answered."""
        return [rank for rank in self.asked if rank not in self.answers]

    def result(self) -> Any:
        """Return the value or raise the error of a call that is `done`.

        Decodes the answers: call it once.
        """
        if self.error is not None:
            raise self.error
        if self.failed is not None:
            raise self.fail(*self.failed)
        if self.shape is not COLLECTIVE:
            if self.shape is GATHER:
                return [self._outcome(rank) for rank in self.asked]
            assert self.rank is not None
            return self._value(self.rank)
        if self.want is not None:
            value = self._value(self.want)
            for answer in self.answers.values():
                if isinstance(answer, Frame):
                    answer.drop()
            return value
        if self.probe is not None:
            values = [self._value(rank) for rank in self.asked]
        else:
            answers: dict[int, Any] = self.answers
            values = [answers[rank].value() for rank in self.asked]
        return values if self.aggregate is None else self.aggregate(values, self.lead)

    def fail(self, frame: Frame, rank: int) -> BaseException:
        """Return the exception that *rank* answered with, with its rank and remote traceback."""
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
        was_sent = self.retries < self.options.retries  # before a death
        aimed = [] if self.rank is None or was_sent else [self.rank]
        ranks = self.missing if self.wire else aimed
        return CallTimeout(
            self.name,
            ranks,
            self.options.timeout or 0.0,
            sent=bool(self.wire) or was_sent,
            reports=self.reports,
        )

    def drop(self) -> None:
        """Release the memory of its arguments."""
        for payload in self.payloads:
            if payload.flags:
                payload.close()

    def _value(self, rank: int) -> Any:
        frame = self.answers[rank]
        assert isinstance(frame, Frame)
        value = frame.value()
        return value if self.probe is None else self.probe.take(rank, value)

    def _outcome(self, rank: int) -> Outcome:
        answer = self.answers[rank]
        if isinstance(answer, Outcome):
            return answer
        if answer.kind == Kind.ERROR:
            return Outcome(rank, OutcomeKind.ERROR, error=self.fail(answer, rank))
        try:
            return Outcome(rank, OutcomeKind.OK, self._value(rank))
        except Exception as error:  # noqa: BLE001  # a reply whose type cannot be rebuilt here
            return Outcome(rank, OutcomeKind.ERROR, error=error)
