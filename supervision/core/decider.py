"""What an exception or an exit of a child means, where a user knows better than the table.

Guarantees: the first rule that applies decides; where none does, `Decider.directive` is None and
the caller's own default holds (for an exit: OTP's table). A rule whose predicate raises does not
apply. A decider never touches the child; it is asked.

Left to others: carrying the directive out. *resume*: the worker goes on. *restart*: an abnormal
exit, which counts. *stop*: the child ends for good, as a transient one does that ended normally.
*escalate*: the supervisor gives up at once. Whatever is decided, the caller of a method that
raised gets its exception first.

Prior art: the supervision directives of Akka.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, cast

from phalanx.supervision.errors import SpecError, error_text

from .policy import ExitKind, ExitReason


class Directive(StrEnum):
    """What to do about an exception or an exit."""

    RESUME = "resume"
    RESTART = "restart"
    STOP = "stop"
    ESCALATE = "escalate"


Cause: TypeAlias = BaseException | ExitReason
Match: TypeAlias = type[BaseException] | ExitKind | str | Callable[[Cause], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a decider.

    Attributes:
        match: An exception type (subclasses too), an `ExitKind`, the name of an exception type
            (bare or qualified, for types that the driver has not imported), or a predicate.
        directive: What a match leads to.
        child: Only for the child of this id; None for all.
    """

    match: Match
    directive: Directive
    child: str | None = None

    def __post_init__(self) -> None:
        _check_match(self.match)
        _check_directive("directive", self.directive)
        _check_child(self.child)

    def applies(self, cause: Cause, child: str | None) -> bool:
        """Return whether this rule decides about *cause* in *child*."""
        if self.child is not None and self.child != child:
            return False
        match self.match:
            case ExitKind() as kind:
                return isinstance(cause, ExitReason) and cause.kind is kind
            case str() as name:
                return isinstance(cause, BaseException) and name in _names(type(cause))
            case type() as kind:
                return isinstance(cause, kind)
            case predicate:
                return predicate(cause)


def _check_match(value: object) -> None:
    if not (callable(value) or isinstance(value, str)):
        raise SpecError(
            "match", value, "must be an exception type, its name, an ExitKind or a predicate"
        )


def _check_child(value: object) -> None:
    if not (value is None or isinstance(value, str)):
        raise SpecError("child", value, "must be the id of a child, or None")


def _check_directive(name: str, value: object) -> None:
    if not isinstance(value, Directive):
        raise SpecError(name, value, f"must be one of {', '.join(Directive)}")


def _rules(given: object) -> tuple[Rule, ...]:
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise SpecError("rules", given, "must be a list of rules")
    rules = tuple(cast("Iterable[object]", given))
    for rule in rules:
        if not isinstance(rule, Rule):
            raise SpecError("rules", rule, "must be a Rule")
    return cast("tuple[Rule, ...]", rules)


def _names(kind: type[BaseException]) -> set[str]:
    plain = {base.__qualname__ for base in kind.__mro__}
    return plain | {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}


@dataclass(frozen=True, slots=True)
class Decider:
    """Rules, asked in order.

    Attributes:
        rules: The first that applies decides.
        default: Where none applies; None leaves it to the caller.
    """

    rules: tuple[Rule, ...] = ()
    default: Directive | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _rules(self.rules))
        if self.default is not None:
            _check_directive("default", self.default)

    def directive(
        self,
        cause: Cause,
        child: str | None = None,
        *,
        failed: Callable[[BaseException], None] | None = None,
    ) -> Directive | None:
        """Return what to do about *cause*, or None where no rule says so.

        *failed* is told of what predicates raise.
        """
        for rule in self.rules:
            try:
                applies = rule.applies(cause, child)
            except BaseException as error:  # noqa: BLE001 # an exit must not be lost to a mistake in a predicate
                applies = False
                if failed is not None:
                    failed(error)
            if applies:
                return rule.directive
        return self.default


# A kernel that failed leaves the CUDA context of its process unusable: every later call fails
# too, often far from the cause, so only a new process helps. The texts are those of the CUDA
# runtime, which torch passes on.
_STICKY = (
    "device-side assert",
    "hardware stack error",
    "invalid program counter",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "uncorrectable ecc error",
    "nvlink error",
    "launch timed out",
)


def is_sticky_device_error(cause: Cause) -> bool:
    """Return whether *cause* is a CUDA error after which its process cannot go on."""
    if isinstance(cause, ExitReason) or "OutOfMemoryError" in _names(type(cause)):
        return False
    text = error_text(cause).lower()
    if "cuda" not in text and not _names(type(cause)) & {"AcceleratorError", "CudaError"}:
        return False
    return any(phrase in text for phrase in _STICKY)


_BROKEN_GROUP = {"DistBackendError", "DistNetworkError"}


def is_broken_process_group(cause: Cause) -> bool:
    """Return whether *cause*, or what it was raised from, says that a process group is broken.

    Torch has types for that which gloo does not use: its errors are RuntimeErrors that begin with
    the line of gloo's source they come from. After any of them, a timeout included, its
    connections are closed for good.
    """
    seen: set[int] = set()
    error: BaseException | None = None if isinstance(cause, ExitReason) else cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _names(type(error)) & _BROKEN_GROUP:
            return True
        if isinstance(error, RuntimeError) and "gloo/transport/" in error_text(error):
            return True
        error = error.__cause__ or error.__context__
    return False


GPU_WORKER = Decider(
    rules=(
        # Memory that one call could not have is free again when it has failed.
        Rule("OutOfMemoryError", Directive.RESUME),
        Rule(is_sticky_device_error, Directive.RESTART),
        Rule(is_broken_process_group, Directive.RESTART),
        Rule(Exception, Directive.RESUME),
    )
)
"""Sensible directives for methods of GPU workers: what breaks the process restarts it."""

RESUME_UNLESS_BROKEN = Decider((Rule(is_sticky_device_error, Directive.RESTART),))
"""What holds for methods of a rank where nobody says otherwise: it goes on, unless it cannot."""
