"""Every error that phalanx raises, in one tree, split by fault: the caller's, the worker's, ours.

- Every error is a `PhalanxError`; its message names the field or child, the value with its unit,
  and the remedy. One that stands in for a builtin (a bad value, a timeout) is that builtin too.
- Every error survives pickling: its attributes and notes come back, `__init__` is not called again.
- The exception of a worker's own method is not in this tree: the caller gets the original type.

Prior art for the split by fault: ``ProtocolError`` and its children in h11's ``_util.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class PhalanxError(Exception):
    """The root: catch it to catch everything phalanx itself raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[PhalanxError], args: tuple[Any, ...]) -> PhalanxError:
    error = kind.__new__(kind)
    error.args = args
    return error


# --- the caller's fault -------------------------------------------------------------------


class CallerError(PhalanxError):
    """The caller's request is invalid; nothing was started or sent."""


class SpecError(CallerError, ValueError):
    """An invalid value in a spec, a constructor or a call.

    Attributes:
        field: The name of the argument or field, as the caller wrote it.
        value: The value given.
        remedy: The correction.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {remedy}")
        self.field, self.value, self.remedy = field, value, remedy


class NotPicklable(CallerError, TypeError):
    """A class, argument or callable that cannot be pickled for a worker; nothing was sent."""


class MessageTooLarge(CallerError, ValueError):
    """A message of *size* bytes, where *limit* are free for it; none of it was written."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes, where {limit} bytes are free for it")
        self.size, self.limit = size, limit


class UnknownMethod(CallerError, AttributeError):
    """The worker class has no public method of that name."""


class BadArguments(CallerError, TypeError):
    """The method exists but cannot be called with these arguments; the worker goes on."""


class WouldDeadlock(CallerError, RuntimeError):
    """A blocking call that could never return, such as one from a done-callback."""


class LockNotHeld(CallerError, RuntimeError):
    """A shared lock was released by a thread that does not hold it."""


class ChildRefused(CallerError):
    """A supervisor refused a request about *child*, because of its state.

    *why* is OTP's word for it, such as ``not_found`` or ``already_started``.
    """

    def __init__(self, why: str, child: str) -> None:
        super().__init__(f"child {child!r}: {why}")
        self.why, self.child = why, child


class SupervisorDown(CallerError, RuntimeError):
    """The supervisor has ended, or ended before it handled the request."""

    def __init__(self, message: str = "the supervisor has ended") -> None:
        super().__init__(message)


class StreamNotTaken(CallerError, TimeoutError):
    """A stream was closed because nothing took its items for ``take_within`` seconds."""


class ExecutorClosed(CallerError, RuntimeError):
    """The executor was closed before the call was answered, or its group had ended already.

    Calls that wait when a group gives up after too many deaths end with `WorkerDied` and its
    reports; later calls end with this error, and that `WorkerDied` is its ``__cause__``.

    Attributes:
        sent: False if the call was refused or still queued: it never ran anywhere.
    """

    def __init__(self, message: str = "", *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


# --- the worker's fault -------------------------------------------------------------------


class WorkerError(PhalanxError):
    """Something went wrong in a worker process."""


class _WithReports(WorkerError):
    def __init__(self, message: str, reports: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.reports: tuple[Any, ...] = tuple(reports)


class WorkerDied(_WithReports):
    """A worker process ended before it answered, or its group gave up after too many did.

    Safe to retry only for calls that may run twice (`idempotent`).

    Attributes:
        reports: The crash reports of every death that cost this call an attempt, oldest first; for
            a call that still waited when its group gave up, also those that the group gave up for.
        sent: False if the call was still queued: it never ran anywhere.
    """

    sent = True

    @property
    def report(self) -> Any:
        """The crash report of the last death, or None where none could be written."""
        return self.reports[-1] if self.reports else None


class StartFailed(_WithReports):
    """A worker did not become ready: it raised, exited, hung or was killed in its start.

    The exception that the worker raised, if it did, is the ``__cause__``.

    Attributes:
        reports: The crash reports of the ranks that failed.
    """


class RemoteError(WorkerError):
    """Stands in for a worker's exception or reply that could not be pickled.

    Attributes:
        type_name: The qualified name of the original type.
        traceback: The formatted remote traceback.
    """

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name, self.message, self.traceback = type_name, message, traceback


class CallTimeout(WorkerError, TimeoutError):
    """The deadline passed before every wanted rank had answered.

    The ranks named may still be running the call; what happens to them is the call's
    ``on_timeout`` policy.

    Attributes:
        ranks: The ranks that had not answered; empty if nothing was sent, or if the ranks that had
            begun the call died and it was waiting to be sent again.
        sent: False if the call was still queued: it never ran anywhere.
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
        self.method, self.ranks, self.timeout, self.sent = method, tuple(ranks), timeout, sent
        self.reports: tuple[Any, ...] = tuple(reports)
        named = ", ".join(map(str, self.ranks))
        if not sent:
            state = f"never sent; still waiting for {f'rank(s) {named}' if named else 'its turn'}"
        elif named:
            state = f"no answer from rank(s) {named}"
        else:
            state = "begun, cut short, and still waiting to be sent again"
        super().__init__(f"{method}: {state} after {timeout:.3g} s")


class LockTimeout(WorkerError, TimeoutError):
    """Another worker held a shared lock until this one's timeout.

    Attributes:
        holder: The holder, in words; empty if the lock was just changing hands.
    """

    def __init__(self, name: str, timeout: float, holder: str = "") -> None:
        how = f"still held by {holder}" if holder else "changing hands, or had others waiting,"
        super().__init__(f"lock {name!r} was {how} after {timeout:.3g} s")
        self.name, self.timeout, self.holder = name, timeout, holder


class Unhealthy(CallTimeout):
    """A health check in which not every rank answered.

    Attributes:
        states: The state of each rank that did not answer: ``busy`` (it used the processor),
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
        problems = "; ".join(f"rank {rank} is {text}" for rank, text in self.details.items())
        self.args = (f"{self.args[0]}: {problems}",)


# --- ours, or the machine's ---------------------------------------------------------------


class RuntimeFault(PhalanxError):
    """A process, descriptor or socket of phalanx itself failed; the message says which."""


class MissingPackage(RuntimeFault, ModuleNotFoundError):
    """A package that only a part of phalanx needs is not installed: install the *extra*.

    Attributes:
        package: The missing package, such as ``torch``.
        extra: The extra of phalanx that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'phalanx[{extra}]'")
        self.package, self.extra = package, extra


class NodeRefused(RuntimeFault):
    """A node that may not serve: other versions than the driver's, or an unknown key.

    Nothing runs on it. Install the same versions there, or start the node anew.
    """


class NoDevice(RuntimeFault):
    """There is no device for a rank: others hold them, or they are in quarantine.

    Attributes:
        who: The rank that requested one.
        share: The requested number of devices, or the share of one.
        leased: The holders of each leased device.
        quarantined: The reason for each device in quarantine.
        releasing: Devices whose memory was being released.
        soon: Whether such a release could have been enough: try again.
        limit: The limit that ended the wait, such as ``devices.timeout=30 s``; empty without one.
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
    ) -> None:
        self.who, self.share, self.soon, self.limit = who, share, soon, ""
        self.leased, self.quarantined = dict(leased), dict(quarantined)
        self.releasing = tuple(releasing)
        problems = [f"{name} is leased to {', '.join(to)}" for name, to in self.leased.items()]
        problems += [f"{name} is in quarantine: {why}" for name, why in self.quarantined.items()]
        problems += [f"{name} is being released" for name in self.releasing]
        wanted = (
            "a device" if share == 1 else f"{share:g} {'devices' if share > 1 else 'of a device'}"
        )
        super().__init__(
            f"no room for {who}, which wants {wanted}: {'; '.join(problems) or 'none'}"
        )

    def after(self, limit: str) -> NoDevice:
        """Return this error at the end of a wait, whose *limit* it names from now on."""
        self.limit = limit
        self.args = (f"{self}; it has waited for {limit}" if limit else str(self),)
        return self


class NoNode(NoDevice):
    """There is no machine for a rank: the engine found none in time, or none that could serve."""

    def __init__(self, why: str) -> None:
        super().__init__("a rank", 1, leased={}, quarantined={})
        self.args = (why,)


class AddressNotReached(NoNode):
    """Nodes do not reach the address of this machine on which the driver's side listens.

    Give ``cluster.bind`` one that they reach, and let its ports through.

    Attributes:
        address: Where it listens, as ``tcp://HOST:PORT``.
    """

    def __init__(self, why: str, address: str = "") -> None:
        super().__init__(why)
        self.address = address


def error_line(error: BaseException) -> str:
    """Return the type and the text of *error*; `error_text` if its ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 # as below
        return error_text(error)


def error_text(error: object) -> str:
    """Return *error* as text; the name of its class if its ``__repr__`` raises."""
    try:
        return repr(error)
    except BaseException:  # noqa: BLE001 # a user's ``__repr__`` must not cost the report of its error
        return f"{type(error).__name__} (its text cannot be made)"
