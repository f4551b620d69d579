"""Every error phalanx raises, in one tree, split by whose fault it is.

Guarantees: every error a user can meet is a `PhalanxError`; its message names the field or child,
the value with its unit, and what to do. Errors that stand in for a builtin (a bad value, a
timeout) are that builtin too, so that code which never heard of phalanx catches them.

An exception raised by a worker's own method is *not* in this tree: the caller gets the original
type (see `docs/semantics.md`).

Prior art for the split by fault: ``ProtocolError`` and its children in h11's ``_util.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class PhalanxError(Exception):
    """The root: catch it to catch everything phalanx itself raises."""


# --- the caller's fault -------------------------------------------------------------------


class CallerError(PhalanxError):
    """The caller asked for something that makes no sense; nothing was started or sent."""


class SpecError(CallerError, ValueError):
    """A value that makes no sense in a spec, a constructor or a call.

    Attributes:
        field: The name of the argument or field, as the caller wrote it.
        value: What was given.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.remedy)


class NotPicklable(CallerError, TypeError):
    """A class, argument or callable that cannot travel to a worker; nothing was sent."""


class MessageTooLarge(CallerError, ValueError):
    """A message for which there is no memory; none of it was written.

    Attributes:
        size: Bytes of the message.
        limit: Bytes that were free for it.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes, where {limit} bytes are free for it")
        self.size = size
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.size, self.limit)


class UnknownMethod(CallerError, AttributeError):
    """The worker class has no public method of that name."""


class BadArguments(CallerError, TypeError):
    """The method exists but cannot be called with these arguments; the worker goes on."""


class WouldDeadlock(CallerError, RuntimeError):
    """A blocking call where blocking can never end, such as from a done-callback."""


class LockNotHeld(CallerError, RuntimeError):
    """A shared lock was let go by a thread that does not have it."""


class ChildRefused(CallerError):
    """A supervisor refused a request about a child, because of the state that is in.

    Attributes:
        why: OTP's word for it, such as ``not_found`` or ``already_started``.
        child: The child asked about.
    """

    def __init__(self, why: str, child: str) -> None:
        super().__init__(f"child {child!r}: {why}")
        self.why = why
        self.child = child

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.why, self.child)


class SupervisorDown(CallerError, RuntimeError):
    """The supervisor has ended, or ended before it came to the request."""


class StreamNotTaken(CallerError, TimeoutError):
    """A stream was closed because nothing took its items for ``take_within`` seconds."""


class ExecutorClosed(CallerError, RuntimeError):
    """The executor was closed before the call was answered, or its group had ended already.

    What waits when a group gives up after too many deaths gets `WorkerDied`, with their reports;
    what is asked of the group after that gets this, with that as its ``__cause__``.
    """


# --- the worker's fault -------------------------------------------------------------------


class WorkerError(PhalanxError):
    """Something went wrong in a worker process."""


class WorkerDied(WorkerError):
    """A worker process ended before it answered, or its group gave up after too many did.

    Safe to retry only for calls that may run twice (`idempotent`).

    Attributes:
        reports: The crash reports of every death that cost this call an attempt, oldest first;
            where it waited still when its group gave up, also those that the group gave up for.
    """

    def __init__(self, message: str, reports: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.reports: tuple[Any, ...] = tuple(reports)

    @property
    def report(self) -> Any:
        """The crash report of the last death, or None where none could be written."""
        return self.reports[-1] if self.reports else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.reports)


class StartFailed(WorkerError):
    """A worker did not become ready: it raised, exited, hung or was killed in its start.

    Where the worker raised, that exception is the ``__cause__``.

    Attributes:
        reports: The crash reports of the ranks that failed.
    """

    def __init__(self, message: str, reports: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.reports: tuple[Any, ...] = tuple(reports)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.reports)


class RemoteError(WorkerError):
    """Stands in for a worker's exception or reply that could not be pickled.

    Attributes:
        type_name: The qualified name of the original type.
        message: Its text.
        traceback: The formatted remote traceback.
    """

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.type_name, self.message, self.traceback)


class CallTimeout(WorkerError, TimeoutError):
    """The deadline passed before every wanted rank had answered.

    The ranks named may still be running the call; what happens to them is the call's
    ``on_timeout`` policy.

    Attributes:
        method: What was called.
        ranks: The ranks that had not answered; empty where none had a fault: nothing was sent, or
            what was begun has died and was waiting to be sent again.
        sent: False where the call was still waiting for its turn: it never ran anywhere.
        reports: The crash reports of every death that cost this call an attempt, oldest first.
    """

    def __init__(
        self,
        method: str,
        ranks: Iterable[int],
        timeout: float,
        *,
        sent: bool = True,
        reports: Iterable[object] = (),
    ) -> None:
        self.method = method
        self.ranks = tuple(ranks)
        self.timeout = timeout
        self.sent = sent
        self.reports: tuple[Any, ...] = tuple(reports)
        named = ", ".join(map(str, self.ranks))
        if not sent:
            state = f"never sent; still waiting for {f'rank(s) {named}' if named else 'its turn'}"
        elif named:
            state = f"no answer from rank(s) {named}"
        else:
            state = "begun, cut short, and still waiting to be sent again"
        super().__init__(f"{method}: {state} after {timeout:.3g} s")

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_timeout, (self.method, self.ranks, self.timeout, self.sent, self.reports)


def _call_timeout(
    method: str, ranks: tuple[int, ...], timeout: float, sent: bool, reports: tuple[Any, ...]
) -> CallTimeout:
    return CallTimeout(method, ranks, timeout, sent=sent, reports=reports)


class LockTimeout(WorkerError, TimeoutError):
    """Another worker had a shared lock for as long as this one would wait.

    Attributes:
        name: The lock's.
        timeout: Seconds waited.
        holder: Who has it, in words; empty where it was just changing hands.
    """

    def __init__(self, name: str, timeout: float, holder: str = "") -> None:
        how = (
            f"was still held by {holder}"
            if holder
            else "was changing hands, or had others waiting,"
        )
        super().__init__(f"lock {name!r} {how} after {timeout:.3g} s")
        self.name = name
        self.timeout = timeout
        self.holder = holder

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.timeout, self.holder)


class Unhealthy(CallTimeout):
    """A health check in which not every rank answered.

    Attributes:
        states: What each rank that did not answer was doing: ``busy`` (it used the processor),
            ``waiting`` (it slept in a call: for another rank, a lock, a device; its interpreter
            runs), ``wedged`` (it slept and its interpreter does not run: native code holds the
            interpreter lock, or it is in uninterruptible sleep), ``hung`` (past its limit; it is
            being ended), ``stopped`` (SIGSTOP), ``starting`` or ``dead``.
        details: The same in words.
    """

    def __init__(
        self,
        method: str,
        ranks: Iterable[int],
        timeout: float,
        states: Mapping[int, str],
        details: Mapping[int, str],
    ) -> None:
        super().__init__(method, ranks, timeout)
        self.states = dict(states)
        self.details = dict(details)
        told = "; ".join(f"rank {rank} is {text}" for rank, text in self.details.items())
        self.args = (f"{self.args[0]}: {told}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.method, self.ranks, self.timeout, self.states, self.details)


# --- ours, or the machine's ---------------------------------------------------------------


class RuntimeFault(PhalanxError):
    """A process, descriptor or socket of phalanx itself failed; the message says which."""


class NoDevice(RuntimeFault):
    """There is no device for a rank: others hold them, or they are in quarantine.

    Attributes:
        who: The rank that wanted it.
        share: How many devices it wanted, or which part of one.
        leased: For each device that others hold, who does.
        quarantined: For each device that was put aside, why.
        releasing: Devices whose memory was just being released.
        soon: Whether such a release could have helped: ask again.
        limit: What ended the wait for one, such as ``device_timeout=30 s``; empty where nobody
            waited.
    """

    def __init__(
        self,
        who: str,
        share: float,
        *,
        leased: Mapping[str, tuple[str, ...]],
        quarantined: Mapping[str, str],
        releasing: Iterable[str] = (),
        soon: bool = False,
        limit: str = "",
    ) -> None:
        self.who = who
        self.share = share
        self.leased = dict(leased)
        self.quarantined = dict(quarantined)
        self.releasing = tuple(releasing)
        self.soon = soon
        self.limit = limit
        told = [f"{name} is leased to {', '.join(to)}" for name, to in self.leased.items()]
        told += [f"{name} is in quarantine: {why}" for name, why in self.quarantined.items()]
        told += [f"{name} is being released" for name in self.releasing]
        wanted = "a device" if share == 1 else f"{share:g} of a device"
        if share > 1:
            wanted = f"{share:g} devices"
        waited = f"; it has waited for {limit}" if limit else ""
        reason = "; ".join(told) or "none"
        super().__init__(f"no room for {who}, which wants {wanted}: {reason}{waited}")

    def after(self, limit: str) -> NoDevice:
        """Return the same at the end of a wait, whose *limit* is named."""
        return _no_device(self.who, self.share, {**self._named(), "limit": limit})

    def _named(self) -> dict[str, Any]:
        names = ("leased", "quarantined", "releasing", "soon", "limit")
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_device, (self.who, self.share, self._named())


def _no_device(who: str, share: float, named: dict[str, Any]) -> NoDevice:
    return NoDevice(who, share, **named)


def error_text(error: BaseException) -> str:
    """Return *error* as text, also where it is of a class that cannot show itself."""
    try:
        return repr(error)
    except BaseException:  # noqa: BLE001 # a user's ``__repr__`` must not cost the report of its error
        return f"{type(error).__name__} (its text cannot be made)"
